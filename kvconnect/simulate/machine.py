"""The simulated machine: the sizes of the tiers and the speed of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvconnect.config import DEFAULT_RETENTION_PRIORITY
from kvconnect.errors import ConfigurationError

__all__ = ["Machine"]

_SLOWEST = 1e-3


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine with its cache.

    Attributes:
        device_blocks: the blocks of the primary pool.
        host_blocks: the blocks of pinned host memory; 0: no host tier.
        external_blocks: the blocks that the store holds; 0: no store.
        tokens_per_block: a power of two greater than 1.
        prefill_tokens_per_s: prompt tokens that a request computes in a second; ``inf``: at once.
        decode_tokens_per_s: tokens that a request generates in a second; ``inf``: at once.
        max_batch_size: requests served at once; ``None``: as many as fit.
        max_waiting: requests that may wait; further ones are turned away.
        offload_min_priority: blocks below it are dropped instead of offloaded to the host.
        state_blocks: the memory of one snapshot of recurrent states, in blocks of keys and values;
            0: the model has no states.
        state_interval: tokens between two snapshots; a multiple of `tokens_per_block`.

    Raises:
        ConfigurationError: names the field, the value and what is right.
    """

    device_blocks: int
    host_blocks: int = 0
    external_blocks: int = 0
    tokens_per_block: int = 32
    prefill_tokens_per_s: float = math.inf
    decode_tokens_per_s: float = math.inf
    max_batch_size: int | None = None
    max_waiting: int = 10_000
    offload_min_priority: int = DEFAULT_RETENTION_PRIORITY
    state_blocks: int = 0
    state_interval: int = 1024

    def __post_init__(self) -> None:
        least = {"device_blocks": 1, "host_blocks": 0, "external_blocks": 0, "max_waiting": 0}
        if self.max_batch_size is not None:
            least["max_batch_size"] = 1
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ConfigurationError(f"{name}: {getattr(self, name)} must be at least {limit}")
        if self.state_blocks and self.external_blocks:
            raise ConfigurationError("external_blocks: a store of states is not simulated; give 0")
        if self.state_blocks * 3 > self.device_blocks:
            raise ConfigurationError(
                f"device_blocks: {self.device_blocks} must hold at least three states of "
                f"{self.state_blocks} blocks"
            )
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            if not getattr(self, name) >= _SLOWEST:
                raise ConfigurationError(
                    f"{name}: {getattr(self, name)} must be at least {_SLOWEST:g}"
                )
