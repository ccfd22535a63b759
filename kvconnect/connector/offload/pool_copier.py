"""Copies between the pool and staging slots, on the CPU or on CUDA streams of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvconnect.connector.offload.messages import BlockLoad
from kvconnect.connector.offload.staging import Slot, StagingPool
from kvconnect.kernels.block_copy import copy_pairs
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.transfer import Transfer
from kvconnect.kernels.cuda.driver.streams import copy_streams
from kvconnect.layout import KvCacheLayout

__all__ = ["PoolCopier", "clear_beyond", "copy_batches"]

_BATCH_BLOCKS = 64


class PoolCopier:
    """Moves blocks between one pool and the slots of a staging memory.

    On the CPU every copy is over when its method returns. On CUDA copies are enqueued, those into
    the pool on the device's load stream, those out of it on its store stream; slots must be
    page-locked for that to be concurrent. Methods may be called from several threads.
    """

    def __init__(self, pool: Tensor, layout: KvCacheLayout, staging: StagingPool) -> None:
        self.pool = pool
        self.layout = layout
        self._blocks = PagedKv.from_pool(pool, layout)
        self._slots = staging.paged(layout)
        streams = copy_streams(pool.device) if pool.is_cuda else None
        self._in = None if streams is None else streams.load
        self._out = None if streams is None else streams.store

    def copy_out(
        self, block_ids: Sequence[int], slots: Sequence[Slot], stream: torch.cuda.Stream | None
    ) -> Transfer:
        """Blocks to slots, behind what `stream` has been given; `stream` waits for the copies.

        The slots can be read once the transfer is done.
        """
        indices = [slot.index for slot in slots]
        if self._out is None:
            return copy_pairs(self._blocks, self._slots, block_ids, indices)
        before = stream if stream is not None else torch.cuda.current_stream(self.pool.device)
        self._out.wait_stream(before)
        transfer = copy_pairs(self._blocks, self._slots, block_ids, indices, stream=self._out)
        transfer.wait_on(before)
        return transfer

    def order_copies_in(self, stream: torch.cuda.Stream | None) -> None:
        """Copies into the pool come behind what `stream` has been given so far."""
        if self._in is not None and stream is not None:
            self._in.wait_stream(stream)

    def copy_in(
        self, slots: Sequence[Slot], block_ids: Sequence[int], layers: range | None = None
    ) -> None:
        """Each slot's payload, or only `layers` of it, to its block.

        The slots stay as they are until the copies are over, see `mark_copies_in`.
        """
        copy_pairs(
            self._slots,
            self._blocks,
            [slot.index for slot in slots],
            block_ids,
            layers=slice(None) if layers is None else layers,
            stream=self._in,
            stable_source=True,
        )

    def mark_copies_in(self) -> torch.cuda.Event | None:
        """An event behind the copies into the pool that were enqueued so far."""
        return None if self._in is None else self._in.record_event()


def copy_batches(blocks: Sequence[BlockLoad]) -> Iterator[slice]:
    """Runs of `blocks` of one pool group, not too long: between two a load can be called off."""
    start = 0
    for stop in range(1, len(blocks) + 1):
        at_end = stop == len(blocks) or blocks[stop].group != blocks[start].group
        if at_end or stop - start == _BATCH_BLOCKS:
            yield slice(start, stop)
            start = stop


def clear_beyond(payload: Tensor, layout: KvCacheLayout, num_tokens: int) -> None:
    """Zero what a block's bytes hold past its first `num_tokens`: KV of its owner before.

    `payload` is a 1-D uint8 host tensor of ``layout.block_nbytes``; changed in place.
    """
    elements = payload.view(layout.dtype)
    if layout.kv_factor == 2:
        planes = elements.view(layout.num_layers * 2, layout.tokens_per_block, -1)
        planes[:, num_tokens:].zero_()
        return
    planes = elements.view(layout.num_layers, layout.plane_elements)
    keys = layout.tokens_per_block * layout.num_kv_heads * layout.key_dim
    for part in (planes[:, :keys], planes[:, keys:]):
        if part.shape[1]:
            rows = part.shape[1] // layout.tokens_per_block
            part[:, num_tokens * rows :].zero_()
