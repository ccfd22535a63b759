"""Loads in the step that needs them: layer by layer, in front of the forward pass."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvconnect.connector.background_loads import leading
from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.offload_data import BlockLoad, LoadBlocks
from kvconnect.connector.pool_copier import PoolCopier
from kvconnect.connector.staging import Slot, StagingPool
from kvconnect.connector.store import OffloadStore
from kvconnect.errors import BackendTimeout, KvConnectError
from kvconnect.keys import Shard, store_key

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


class StepLoad:
    """The synchronous loads of one step.

    Blocks are read into staging and copied into the pool one layer after the other, so that layer 0
    can be computed while layer 1 is copied. Where the staging memory does not hold them all, those
    that do not fit go first and whole. Past the deadline nothing is copied any more and every load
    that is not complete has failed; what it would have filled is recomputed, so the forward pass of
    this step may read anything there.
    """

    def __init__(
        self,
        orders: Sequence[LoadBlocks],
        store: OffloadStore,
        staging: StagingPool,
        copier: PoolCopier,
        *,
        shard: Shard,
        timeout_s: float,
        layerwise: bool,
    ) -> None:
        self._progress = [_Progress(order) for order in orders]
        self._store = store
        self._staging = staging
        self._copier = copier
        self._shard = shard
        self._timeout_s = timeout_s
        self._layerwise = layerwise
        self._deadline = time.monotonic() + timeout_s
        num_layers = copier.layout.num_layers
        self._ready = [threading.Event() for _ in range(num_layers)]
        self._events: list[torch.cuda.Event | None] = [None] * num_layers
        self._copy_lock = threading.Lock()
        self._closed = False
        self._over = threading.Event()

    def start(self) -> None:
        """Begin; does not block."""
        self._store.submit(self._run())

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None) -> None:
        """Block until `layer` is in the pool, or in front of `stream`, or never will be."""
        if not self._ready[layer].wait(self._left()):
            self._close(f"not done within {self._timeout_s:g} s")
        event = self._events[layer]
        if event is not None and stream is not None:
            stream.wait_event(event)

    def finish(self) -> list[TransferFailure]:
        """Block until everything is over, at most up to the deadline; what failed."""
        if not self._over.wait(self._left()):
            self._close(f"not done within {self._timeout_s:g} s")
        tokens = self._copier.layout.tokens_per_block
        return [
            TransferFailure(
                one.order.request_id,
                Direction.LOAD,
                leading(one.order, one.copied, tokens),
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
        event = self._copier.mark_copies_in()
        if event is not None:
            event.synchronize()

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
        slots = self._staging.take(Direction.LOAD, at_most)
        while not slots and not self._closed:
            # Rare: background loads have all of them. They give some back within milliseconds.
            await asyncio.sleep(0.001)
            slots = self._staging.take(Direction.LOAD, at_most)
        return slots

    async def _load_wave(
        self, wave: Sequence[tuple[_Progress, BlockLoad]], slots: list[Slot], *, whole: bool
    ) -> None:
        pieces = [
            _Piece(progress, slot, block)
            for (progress, block), slot in zip(wave, slots, strict=False)
        ]
        pending: list[Future[None]] = []
        try:
            sound: list[_Piece] = []
            for progress in dict.fromkeys(piece.progress for piece in pieces):
                own = [piece for piece in pieces if piece.progress is progress]
                sound += own[: await self._read(progress, own, pending)]
            loop = asyncio.get_running_loop()
            copy = self._copy_whole if whole else self._copy_by_layer
            await loop.run_in_executor(self._store.copying, copy, sound)
        finally:
            self._give_back(slots, pending)

    async def _read(
        self, progress: _Progress, pieces: Sequence[_Piece], pending: list[Future[None]]
    ) -> int:
        """How many leading `pieces` arrived."""
        group = progress.order.group
        keys = [store_key(piece.block.key, group, self._shard) for piece in pieces]
        filled = 0
        reason = "a block is gone from the store, or was damaged"
        try:
            filled = await self._store.backend.load(keys, [piece.slot.frame for piece in pieces])
        except BackendTimeout as error:
            reason = str(error)
            if error.pending is not None:
                pending.append(error.pending)
        except KvConnectError as error:
            reason = str(error)
        if filled < len(pieces):
            progress.failed = True
            progress.reason = progress.reason or reason
        return filled

    def _give_back(self, slots: Sequence[Slot], pending: Sequence[Future[None]]) -> None:
        """Give `slots` back once none of the abandoned reads can write into them."""
        if not pending:
            self._staging.give_back(Direction.LOAD, slots)
            return
        first, rest = pending[0], pending[1:]
        first.add_done_callback(lambda _: self._give_back(slots, rest))

    # ------------------------------------------------------------------ on a copy thread

    def _copy_whole(self, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            with self._copy_lock:
                if self._closed:
                    return
                self._copier.copy_in(piece.slot, piece.block.block_id)
        self._copied(pieces)

    def _copy_by_layer(self, pieces: Sequence[_Piece]) -> None:
        for layer, ready in enumerate(self._ready):
            for piece in pieces:
                with self._copy_lock:
                    if self._closed:
                        return
                    layers = range(layer, layer + 1)
                    self._copier.copy_in(piece.slot, piece.block.block_id, layers)
            self._events[layer] = self._copier.mark_copies_in()
            ready.set()
        self._copied(pieces)

    def _copied(self, pieces: Sequence[_Piece]) -> None:
        event = self._copier.mark_copies_in()
        if event is not None:
            event.synchronize()  # the slots are handed on
        with self._copy_lock:
            if not self._closed:
                for piece in pieces:
                    piece.progress.copied += 1
