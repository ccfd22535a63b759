"""Memory that its owner lends for the time of a call, as blocks of a pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvconnect.connector.offload.staging import PoolCopier, Slot, StagingPool
from kvconnect.kernels.block_copy import copy_pairs
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.transfer import Transfer
from kvconnect.kernels.cuda.driver.streams import copy_streams
from kvconnect.layout import KvCacheLayout

__all__ = ["AttachedCopier"]

_BITS = 32
_INDEX = (1 << _BITS) - 1


class AttachedCopier(PoolCopier):
    """A copier whose pool is all memory that is attached at the moment.

    A block id says which memory, and which block of it. What is not attached any more is not
    written to: an id of it is passed over. Thread-safe.

    Args:
        layout: of a block.
        staging: where blocks come from and go to.
        device: of all memory that is ever attached.
    """

    def __init__(self, layout: KvCacheLayout, staging: StagingPool, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._slots = staging.paged(layout)
        streams = copy_streams(device) if device.type == "cuda" else None
        self._in = None if streams is None else streams.load
        self._out = None if streams is None else streams.store
        self._memories: dict[int, PagedKv] = {}
        self._numbers = itertools.count()

    @contextmanager
    def attached(self, memory: PagedKv) -> Iterator[int]:
        """Attach `memory` for the time of the context; yields the id of its first block.

        Block ids are consecutive. On CUDA a copy may still be enqueued when the context ends: it
        keeps the memory alive, and the stream that it was ordered behind waits for it.
        """
        number = next(self._numbers)
        self._memories[number] = memory
        try:
            yield number << _BITS
        finally:
            del self._memories[number]

    def copy_out(
        self, block_ids: Sequence[int], slots: Sequence[Slot], stream: torch.cuda.Stream | None
    ) -> Transfer:
        """As `PoolCopier.copy_out`; all of `block_ids` are of one memory, which is attached."""
        memory = self._memories[block_ids[0] >> _BITS]
        source = [block_id & _INDEX for block_id in block_ids]
        target = [slot.index for slot in slots]
        if self._out is None:
            return copy_pairs(memory, self._slots, source, target)
        before = stream if stream is not None else torch.cuda.current_stream(self._device)
        self._out.wait_stream(before)
        transfer = copy_pairs(memory, self._slots, source, target, stream=self._out)
        transfer.wait_on(before)
        return transfer

    def copy_in(self, slots: Sequence[Slot], block_ids: Sequence[int]) -> None:
        """As `PoolCopier.copy_in`; all of `block_ids` are of one memory."""
        memory = self._memories.get(block_ids[0] >> _BITS)
        if memory is None:
            return
        copy_pairs(
            self._slots,
            memory,
            [slot.index for slot in slots],
            [block_id & _INDEX for block_id in block_ids],
            stream=self._in,
            stable_source=True,
        )
