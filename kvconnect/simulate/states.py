"""The snapshots of recurrent states in a simulation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.memory.copier import BlockCopier
from kvconnect.config import KvCacheConfig
from kvconnect.layout import KvCacheLayout, StateTensor
from kvconnect.simulate.machine import Machine

__all__ = ["commit_with_snapshots", "simulated_blocks"]


def simulated_blocks(
    machine: Machine, copier: BlockCopier, clock: Callable[[], float]
) -> BlockManager:
    """Returns the block manager of `machine`; with states, both pools share its memory."""
    size = machine.tokens_per_block
    attention = KvCacheLayout(1, 1, 1, 1, size, torch.int8)
    if not machine.state_blocks:
        config = KvCacheConfig(
            tokens_per_block=size, secondary_offload_min_priority=machine.offload_min_priority
        )
        return BlockManager(
            config,
            attention,
            num_blocks=machine.device_blocks,
            num_host_blocks=machine.host_blocks,
            copier=copier,
            clock=clock,
        )
    nbytes = attention.block_nbytes
    state = StateTensor(1, "state", (machine.state_blocks * nbytes,), torch.int8)
    config = KvCacheConfig(
        tokens_per_block=size,
        secondary_offload_min_priority=machine.offload_min_priority,
        state_interval=machine.state_interval,
        max_gpu_total_bytes=machine.device_blocks * nbytes,
        host_cache_size=machine.host_blocks * nbytes,
    )
    layouts = [attention, KvCacheLayout.of_states([state], size)]
    return BlockManager(config, layouts, copier=copier, clock=clock)


def commit_with_snapshots(blocks: BlockManager, request_id: int, start: int, stop: int) -> int:
    """Commits the tokens ``start..stop`` of a sequence, with a snapshot at each end that is due.

    Returns the number of snapshots.
    """
    num_taken = 0
    while (end := blocks.next_state_end(request_id, start)) is not None and end <= stop:
        num_taken += blocks.state_snapshot(request_id, end) is not None
        blocks.commit(request_id, end)
        start = end
    blocks.commit(request_id, stop)
    return num_taken
