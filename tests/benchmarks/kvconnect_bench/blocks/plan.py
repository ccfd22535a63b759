"""The sizes of the workloads of ``bench blocks``."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class BlocksPlan:
    """Sizes of the workloads.

    Attributes:
        tokens: of the long prompts.
        requests: of the mixed traffic.
        cached_blocks: of the largest pool whose requests are timed.
        rounds: in which the parties take turns; medians count.
        repeats: of a long prompt in one round.

    Raises:
        ConfigurationError: a size is too small to mean anything.
    """

    tokens: int = 131_072
    requests: int = 10_000
    cached_blocks: int = 1_000_000
    rounds: int = 5
    repeats: int = 9

    def __post_init__(self) -> None:
        smallest = {"tokens": 256, "requests": 1, "cached_blocks": 1000, "rounds": 1, "repeats": 1}
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name}: {getattr(self, name)} must be at least {least}")

    @property
    def mixed(self) -> dict[str, int]:
        """The arguments of the workload ``mixed``."""
        traffic = {"groups": 64, "shared": 2048, "unique": 512, "live": 128}
        return {"blocks": 65_536, "requests": self.requests, **traffic}

    @property
    def prompt_sizes(self) -> list[int]:
        """The tokens of prompts, doubling around `tokens`."""
        return [self.tokens * 2**power // 8 for power in range(5)]

    @property
    def pool_sizes(self) -> list[int]:
        """The blocks of pools, from 1,000 to `cached_blocks`, each ten times the one before."""
        sizes = [1000]
        while sizes[-1] * 10 <= self.cached_blocks:
            sizes.append(sizes[-1] * 10)
        return sizes

    @property
    def shared_prompts(self) -> dict[str, int]:
        """The arguments of the measurement of memory."""
        return {"groups": 32, "shared": self.tokens, "unique": self.tokens // 16 // 16 * 16}
