"""Starts the peers that the user has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvconnect_bench.blocks.party import Party, PartyFailed
from kvconnect_bench.peer_python import require_peer_python

OWN = "kvconnect"


class _Peer(NamedTuple):
    name: str
    module: str
    arguments: tuple[str, ...] = ()
    remark: str = ""


_PEERS = (
    _Peer("vLLM", "kvconnect_bench.peers.vllm"),
    _Peer("vLLM", "kvconnect_bench.peers.vllm", ("hashing",), " with hashing"),
    _Peer("SGLang", "kvconnect_bench.peers.sglang", (), " ({tree})"),
)


@dataclass(frozen=True, slots=True)
class Field:
    """The parties that take part.

    Attributes:
        parties: by name, kvconnect first; the others' names have their versions.
        left_out: a sentence for each peer that was not found.
    """

    parties: dict[str, Party]
    left_out: list[str]

    def names(self, start: str) -> list[str]:
        """The parties whose names begin with `start`."""
        return [name for name in self.parties if name.startswith(start)]


@contextmanager
def open_field(pythons: Sequence[Path]) -> Iterator[Field]:
    """Starts kvconnect and every peer found in one of these interpreters; blocks for seconds.

    Raises:
        ConfigurationError: there is no such interpreter, or this is no checkout.
    """
    for python in pythons:
        require_peer_python(python)
    with ExitStack() as stack:
        field = Field({OWN: stack.enter_context(Party(None, "kvconnect_bench.blocks.ours"))}, [])
        missing: dict[str, str] = {}
        for peer in _PEERS:
            reasons = []
            for python in pythons:
                try:
                    party = stack.enter_context(Party(python, peer.module, *peer.arguments))
                except PartyFailed as error:
                    reasons.append(f"{python}: {error}")
                    continue
                version = party.versions["version"]
                remark = peer.remark.format(**party.versions)
                field.parties[f"{peer.name} {version}{remark}"] = party
                break
            else:
                missing[peer.name] = "; ".join(reasons) or "no --peer-python was given"
        field.left_out.extend(f"{name} is left out ({why})." for name, why in missing.items())
        yield field
