"""The settings of ``kvconnect bench transfer``."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("host", "loopback", "link", "handover")
TRANSPORTS = ("tcp", "nixl")


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The parts of a run, and their sizes.

    Attributes:
        parts: of `PARTS`: pulls on one host, over the loopback, over a link of a known rate, and
            from a prefill engine to a decode engine.
        transports: of `TRANSPORTS`.
        total_nbytes: of one pull.
        piece_nbytes: of each of its pieces, which come in random order; divides `total_nbytes`.
        rounds: number of rounds, in which compared reads take turns; the figures are medians.
        rates_gbit: of the links.
        prompt_tokens: of each prompt that is transferred.
        requests: number of prompts that are transferred.
        idle_s: seconds for which two connected engines are watched while they are idle.
    """

    parts: tuple[str, ...] = PARTS
    transports: tuple[str, ...] = TRANSPORTS
    total_nbytes: int = 256 << 20
    piece_nbytes: int = 64 << 10
    rounds: int = 7
    rates_gbit: tuple[float, ...] = (1.0, 8.0)
    prompt_tokens: int = 512
    requests: int = 20
    idle_s: float = 5.0
