"""The simulated machine: the sizes of the tiers and the speed of requests."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvconnect.config import DEFAULT_RETENTION_PRIORITY
from kvconnect.settings import Settings

_Count = Annotated[int, Field(ge=0)]
_Rate = Annotated[float, Field(ge=0.001)]


class Machine(Settings):
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

    device_blocks: Annotated[int, Field(ge=1)]
    host_blocks: _Count = 0
    external_blocks: _Count = 0
    tokens_per_block: int = 32
    prefill_tokens_per_s: _Rate = math.inf
    decode_tokens_per_s: _Rate = math.inf
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    max_waiting: _Count = 10_000
    offload_min_priority: int = DEFAULT_RETENTION_PRIORITY
    state_blocks: _Count = 0
    state_interval: int = 1024

    @model_validator(mode="after")
    def _has_room_for_states(self) -> Self:
        if self.state_blocks and self.external_blocks:
            raise ValueError("external_blocks: a store of states is not simulated; give 0")
        if self.state_blocks * 3 > self.device_blocks:
            raise ValueError(
                f"device_blocks: {self.device_blocks} must hold at least three states of "
                f"{self.state_blocks} blocks"
            )
        return self
