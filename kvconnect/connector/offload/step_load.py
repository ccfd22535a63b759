"""Loads in the step that needs them: layer by layer, in front of the forward pass."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.offload.messages import BlockLoad, LoadBlocks
from kvconnect.connector.offload.staging import Slot, copy_batches
from kvconnect.connector.offload.store import BlockRoute
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import count

__all__ = ["StepLoad"]


@dataclass(slots=True, eq=False)
class _Progress:
    order: LoadBlocks
    copied: int = 0  # leading blocks that are wholly in the pool
    failed: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block and the slot it arrived in."""

    progress: _Progress
    slot: Slot
    block: BlockLoad


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of the model: which of which pool group's."""

    number: int
    group: int
    index: int


def _layers(layouts: Sequence[KvCacheLayout]) -> list[_Layer]:
    """All layers in the order in which the model runs."""
    layers = [
        _Layer(number, group, index)
        for group, layout in enumerate(layouts)
        for index, number in enumerate(layout.layer_numbers)
    ]
    return sorted(layers, key=lambda layer: layer.number)


class StepLoad:
    """The synchronous loads of one step.

    Blocks are read into staging and copied into the pools one layer of the model after the other,
    so that layer 0 can be computed while layer 1 is copied. Where the staging memory does not hold
    them all, those that do not fit go first and whole. Past the deadline nothing is copied any more
    and every load that is not complete has failed; what it would have filled is recomputed, so the
    forward pass of this step may read anything there.
    """

    def __init__(
        self,
        orders: Sequence[LoadBlocks],
        route: BlockRoute,
        *,
        timeout_s: float,
        layerwise: bool,
    ) -> None:
        self._progress = [_Progress(order) for order in orders]
        self._route = route
        self._timeout_s = timeout_s
        self._layerwise = layerwise
        self._deadline = time.monotonic() + timeout_s
        self._layers = _layers(route.layouts)
        self._index = {layer.number: index for index, layer in enumerate(self._layers)}
        self._ready = [threading.Event() for _ in self._layers]
        self._events: list[torch.cuda.Event | None] = [None] * len(self._layers)
        self._copy_lock = threading.Lock()
        self._closed = False
        self._over = threading.Event()

    def start(self) -> None:
        """Begin; does not block."""
        self._route.store.io.submit(self._run())

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None) -> None:
        """Block until `layer` is in its pool, or in front of `stream`, or never will be."""
        index = self._index[layer]
        if not self._ready[index].wait(self._left()):
            self._close(f"not done within {self._timeout_s:g} s")
        event = self._events[index]
        if event is not None and stream is not None:
            stream.wait_event(event)

    def finish(self) -> list[TransferFailure]:
        """Block until everything is over, at most up to the deadline; what failed."""
        if not self._over.wait(self._left()):
            self._close(f"not done within {self._timeout_s:g} s")
        tokens = self._route.layouts[0].tokens_per_block
        for one in self._progress:
            missing = len(one.order.blocks) - one.copied
            count("connector.load.blocks", blocks=one.copied, missing=missing)
        return [
            TransferFailure(
                one.order.request_id,
                Direction.LOAD,
                one.order.num_valid(one.copied, tokens),
                one.reason,
            )
            for one in self._progress
            if one.copied < len(one.order.blocks)
        ]

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _close(self, reason: str) -> None:
        # Set before the lock is asked for, which the copying thread may win again and again. Once
        # this has the lock no copy runs, and none starts afterwards.
        self._closed = True
        with self._copy_lock:
            for one in self._progress:
                one.reason = one.reason or reason
        self._route.wait_for_copies_in()

    # ------------------------------------------------------------------ on the store's loop

    async def _run(self) -> None:
        try:
            jobs = [(one, block) for one in self._progress for block in one.order.blocks]
            while jobs and not self._closed:
                slots = await self._slots(len(jobs))
                wave, jobs = jobs[: len(slots)], jobs[len(slots) :]
                last = not jobs
                await self._load_wave(wave, slots, whole=not (last and self._layerwise))
                jobs = [job for job in jobs if not job[0].failed]
        finally:
            for ready in self._ready:
                ready.set()
            self._over.set()

    async def _slots(self, at_most: int) -> list[Slot]:
        slots = self._route.staging.take(Direction.LOAD, at_most)
        while not slots and not self._closed:
            # Rare: background loads have all of them. They give some back within milliseconds.
            await asyncio.sleep(0.001)
            slots = self._route.staging.take(Direction.LOAD, at_most)
        return slots

    async def _load_wave(
        self, wave: Sequence[tuple[_Progress, BlockLoad]], slots: list[Slot], *, whole: bool
    ) -> None:
        pieces = [
            _Piece(progress, self._route.slot_for(slot, block.group), block)
            for (progress, block), slot in zip(wave, slots, strict=False)
        ]
        pending: list[Future[None]] = []
        try:
            sound: list[_Piece] = []
            for progress in dict.fromkeys(piece.progress for piece in pieces):
                own = [piece for piece in pieces if piece.progress is progress]
                sound += own[: await self._read(progress, own, pending)]
            copy = self._copy_whole if whole else self._copy_by_layer
            await self._route.store.copying.run(lambda: copy(sound))
        finally:
            # Once none of the abandoned reads can write into them.
            self._route.staging.give_back(Direction.LOAD, slots, pending)

    async def _read(
        self, progress: _Progress, pieces: Sequence[_Piece], pending: list[Future[None]]
    ) -> int:
        """How many leading `pieces` arrived."""
        fetched = await self._route.fetch(
            [piece.block for piece in pieces], [piece.slot for piece in pieces]
        )
        pending += fetched.pending
        if fetched.filled < len(pieces):
            progress.failed = True
            progress.reason = progress.reason or fetched.reason
        return fetched.filled

    # ------------------------------------------------------------------ on a copy thread

    def _copy_whole(self, pieces: Sequence[_Piece]) -> None:
        for batch in copy_batches([piece.block for piece in pieces]):
            if not self._copy(pieces[batch]):
                return
        self._copied(pieces)

    def _copy_by_layer(self, pieces: Sequence[_Piece]) -> None:
        for index, layer in enumerate(self._layers):
            own = [piece for piece in pieces if piece.block.group == layer.group]
            for batch in copy_batches([piece.block for piece in own]):
                if not self._copy(own[batch], range(layer.index, layer.index + 1)):
                    return
            self._events[index] = self._route.copiers[layer.group].mark_copies_in()
            self._ready[index].set()
        self._copied(pieces)

    def _copy(self, batch: Sequence[_Piece], layers: range | None = None) -> bool:
        """Copy pieces of one pool group, unless it is too late."""
        slots = [piece.slot for piece in batch]
        block_ids = [piece.block.block_id for piece in batch]
        with self._copy_lock:
            if self._closed:
                return False
            self._route.copiers[batch[0].block.group].copy_in(slots, block_ids, layers)
        return True

    def _copied(self, pieces: Sequence[_Piece]) -> None:
        # The slots are handed on.
        self._route.wait_for_copies_in({piece.block.group for piece in pieces})
        with self._copy_lock:
            if not self._closed:
                for piece in pieces:
                    piece.progress.copied += 1
