"""Copies between the pool and staging slots, on the CPU or on CUDA streams of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from kvconnect.connector.staging import Slot
from kvconnect.kernels.copy import copy_in, copy_out
from kvconnect.layout import KvCacheLayout

__all__ = ["PoolCopier", "PoolCopiers", "clear_beyond"]


class PoolCopier:
    """Moves blocks of one pool.

    On the CPU every copy is over when its method returns. On CUDA copies are enqueued, those into
    the pool on one stream, those out of it on another, and events say when they are over; slots
    must be page-locked for that to be concurrent. Methods may be called from several threads.
    """

    def __init__(self, pool: Tensor, layout: KvCacheLayout) -> None:
        self.pool = pool
        self.layout = layout
        self._cuda = pool.is_cuda
        self._in = torch.cuda.Stream(pool.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(pool.device) if self._cuda else None  # type: ignore[no-untyped-call]

    def copy_out(
        self, block_ids: Sequence[int], slots: Sequence[Slot], stream: torch.cuda.Stream | None
    ) -> torch.cuda.Event | None:
        """Blocks to slots, behind what `stream` has been given; `stream` waits for the copies.

        Returns:
            An event to wait for before the slots are read; ``None``: they can be read now.
        """
        if self._out is None:
            for block_id, slot in zip(block_ids, slots, strict=True):
                copy_out(self.pool, block_id, slot.payload)
            return None
        before = stream if stream is not None else torch.cuda.current_stream(self.pool.device)
        self._out.wait_stream(before)
        with torch.cuda.stream(self._out):
            for block_id, slot in zip(block_ids, slots, strict=True):
                copy_out(self.pool, block_id, slot.payload)
        event: torch.cuda.Event = self._out.record_event()
        before.wait_event(event)
        return event

    def order_copies_in(self, stream: torch.cuda.Stream | None) -> None:
        """Copies into the pool come behind what `stream` has been given so far."""
        if self._in is not None and stream is not None:
            self._in.wait_stream(stream)

    def copy_in(self, slot: Slot, block_id: int, layers: range | None = None) -> None:
        """A slot's payload, or only `layers` of it, to a block."""
        with self._on_in_stream():
            copy_in(slot.payload, self.pool, block_id, layers)

    def mark_copies_in(self) -> torch.cuda.Event | None:
        """An event behind the copies into the pool that were enqueued so far."""
        return None if self._in is None else self._in.record_event()

    def _on_in_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._in is None else torch.cuda.stream(self._in)


class PoolCopiers:
    """The copiers of all pool groups, by group. Thread-safe as each of them is."""

    def __init__(self, copiers: Sequence[PoolCopier]) -> None:
        self._copiers = tuple(copiers)

    def __getitem__(self, group: int) -> PoolCopier:
        return self._copiers[group]

    @property
    def layouts(self) -> tuple[KvCacheLayout, ...]:
        """Of the groups."""
        return tuple(copier.layout for copier in self._copiers)

    @property
    def tokens_per_block(self) -> int:
        """The same in all groups."""
        return self._copiers[0].layout.tokens_per_block

    def slot_for(self, slot: Slot, group: int) -> Slot:
        """`slot` with just the room that a block of `group` takes."""
        return slot.sized(self._copiers[group].layout.block_nbytes)

    def order_copies_in(self, stream: torch.cuda.Stream | None) -> None:
        """Copies into the pools come behind what `stream` has been given so far."""
        for copier in self._copiers:
            copier.order_copies_in(stream)

    def wait_for_copies_in(self, groups: Iterable[int] | None = None) -> None:
        """Block until the copies into the pools (of `groups`) enqueued so far are over."""
        for group in range(len(self._copiers)) if groups is None else groups:
            event = self._copiers[group].mark_copies_in()
            if event is not None:
                event.synchronize()


def clear_beyond(payload: Tensor, layout: KvCacheLayout, num_tokens: int) -> None:
    """Zero what a block's bytes hold past its first `num_tokens`: KV of whoever had it before.

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
