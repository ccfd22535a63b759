"""The copies between pools, or memory that is attached for a call, and staging memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvconnect.connector.io.orders import BlockLoad
from kvconnect.connector.io.staging import StagingPool
from kvconnect.errors import UsageError
from kvconnect.kernels.block_copy import copy_pairs
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.transfer import Transfer
from kvconnect.kernels.cuda.driver.streams import copy_streams
from kvconnect.layout import KvCacheLayout

_BATCH_BLOCKS = 64
_BITS = 32
_INDEX = (1 << _BITS) - 1


class PoolCopier:
    """Moves blocks between one pool and the slots of a staging memory.

    On the CPU every copy has ended when its method returns. On CUDA copies are enqueued, those into
    the pool on the device's load stream, those out of it on its store stream; only page-locked
    slots make copies concurrent. Methods may be called from several threads.

    Args:
        blocks: the planes of the pool, in the order of `layout`.
        layout: the layout of its blocks.
        staging: the slots.
    """

    def __init__(self, blocks: PagedKv, layout: KvCacheLayout, staging: StagingPool) -> None:
        self._begin(layout, staging, blocks.device)
        self._blocks = blocks

    def _begin(self, layout: KvCacheLayout, staging: StagingPool, device: torch.device) -> None:
        self.layout = layout
        self._slots = staging.paged(layout)
        streams = copy_streams(device) if device.type == "cuda" else None
        self._in = None if streams is None else streams.load
        self._out = None if streams is None else streams.store

    def copy_out(
        self, block_ids: Sequence[int], slots: Sequence[int], stream: torch.cuda.Stream | None
    ) -> Transfer:
        """Copies blocks to slots after the work enqueued on `stream`, which waits for the copies.

        The slots can be read once the transfer is done.
        """
        blocks, block_ids = self._located(block_ids)
        if blocks is None:
            raise UsageError("the memory of these blocks is not attached")
        if self._out is None:
            return copy_pairs(blocks, self._slots, block_ids, slots)
        before = stream if stream is not None else torch.cuda.current_stream(blocks.device)
        self._out.wait_stream(before)
        transfer = copy_pairs(blocks, self._slots, block_ids, slots, stream=self._out)
        transfer.wait_on(before)
        return transfer

    def order_copies_in(self, stream: torch.cuda.Stream | None) -> None:
        """Makes later copies into the pool wait for the work enqueued on `stream` so far."""
        if self._in is not None and stream is not None:
            self._in.wait_stream(stream)

    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies each slot's payload to its block.

        The caller must not change the slots until the copies have ended, see `mark_copies_in`.
        """
        blocks, block_ids = self._located(block_ids)
        if blocks is not None:
            copy_pairs(self._slots, blocks, slots, block_ids, stream=self._in, stable_source=True)

    def mark_copies_in(self) -> torch.cuda.Event | None:
        """Returns an event that passes after the copies into the pool that were enqueued so far."""
        return None if self._in is None else self._in.record_event()

    def _located(self, block_ids: Sequence[int]) -> tuple[PagedKv | None, Sequence[int]]:
        """Returns the memory of the blocks, and their numbers in it."""
        return self._blocks, block_ids


class AttachedCopier(PoolCopier):
    """A copier whose pool is the memory that callers have attached.

    A block id names the memory and its block; a call is about blocks of one memory. The ids of
    detached memory are skipped, so it gets no writes. Thread-safe.

    Args:
        layout: the layout of a block.
        staging: the slots.
        device: the device of all memory that is ever attached.
    """

    def __init__(self, layout: KvCacheLayout, staging: StagingPool, device: torch.device) -> None:
        self._begin(layout, staging, device)
        self._memories: dict[int, PagedKv] = {}
        self._numbers = itertools.count()

    @contextmanager
    def attached(self, memory: PagedKv) -> Iterator[int]:
        """Attaches `memory` for the time of the context; yields the id of its first block.

        Block ids are consecutive. On CUDA a copy may still be enqueued when the context ends: the
        copy keeps the memory alive, and the stream of `order_copies_in` waits for the copy.
        """
        number = next(self._numbers)
        self._memories[number] = memory
        try:
            yield number << _BITS
        finally:
            del self._memories[number]

    def _located(self, block_ids: Sequence[int]) -> tuple[PagedKv | None, Sequence[int]]:
        memory = self._memories.get(block_ids[0] >> _BITS)
        return memory, [one & _INDEX for one in block_ids]


def copy_batches(blocks: Sequence[BlockLoad]) -> Iterator[slice]:
    """Yields runs of up to 64 `blocks` of one pool group.

    A load can be cancelled between two runs.
    """
    start = 0
    for stop in range(1, len(blocks) + 1):
        at_end = stop == len(blocks) or blocks[stop].group != blocks[start].group
        if at_end or stop - start == _BATCH_BLOCKS:
            yield slice(start, stop)
            start = stop
