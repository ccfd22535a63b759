"""Copies blocks between a device and host memory, by each of the routes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from kvconnect.kernels.blocks.block_ids import Ids
from kvconnect.kernels.blocks.runs import Runs, RunTable
from kvconnect.kernels.blocks.transfer import DONE, CopyEvent, Transfer
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.cuda.copy_policy import CopyPolicy, Direction
from kvconnect.kernels.cuda.dma import cut, describe, submit
from kvconnect.kernels.cuda.driver.interface import AccessOrder, Descriptors, Driver, Memory
from kvconnect.kernels.cuda.launch.launcher import Grid, Launcher
from kvconnect.kernels.cuda.launch.runs import launch_copy


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """The two halves of a copy: from the source to a buffer, and from the buffer to the target.

    In the buffer blocks follow each other, and the runs of a block have the order that they have in
    host memory. So a contiguous piece of host memory is one run of the buffer.

    Attributes:
        first: the runs from the source to the buffer.
        second: the runs from the buffer to the target.
        nbytes: the size of a block in the buffer.
    """

    first: RunTable
    second: RunTable
    nbytes: int

    def halves(self, copy: BlockCopy, buffer: int) -> tuple[BlockCopy, BlockCopy]:
        """Returns both halves of `copy`, with the buffer at address `buffer`."""
        rows = np.arange(len(copy), dtype=np.int64)
        target = copy.target._replace(address=buffer, ids=rows)
        source = copy.source._replace(address=buffer, ids=rows)
        return (
            replace(copy, table=self.first, target=target),
            replace(copy, table=self.second, source=source),
        )


def staging_of(copy: BlockCopy, direction: Direction) -> Staging:
    """Returns the two halves for the runs of `copy`, from the cache of its table if possible."""
    kept = copy.table.kept.get(direction)
    if kept is None:
        on_host = "source_offset" if direction is Direction.LOAD else "target_offset"
        kept = copy.table.kept.setdefault(direction, _staging(copy.table.runs, on_host))
    return cast("Staging", kept)


def _staging(runs: Runs, on_host: str) -> Staging:
    runs = runs[np.argsort(runs[on_host], kind="stable")]
    sizes = runs["nbytes"]
    in_buffer, total = np.cumsum(sizes) - sizes, int(sizes.sum())
    first, second = runs.copy(), runs.copy()
    first["target_offset"], first["target_step"] = in_buffer, total
    second["source_offset"], second["source_step"] = in_buffer, total
    return Staging(RunTable((), first), RunTable((), second), total)


class Slot:
    """A buffer of a ring, and the event of its last use."""

    __slots__ = ("event", "memory")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.event: CopyEvent | None = None

    def wait_on_stream(self, stream: Any) -> None:
        """Makes later work of `stream` wait until the last use has ended. Does not block."""
        if self.event is not None:
            self.event.wait(stream)

    def wait(self) -> None:
        """Blocks the calling thread until the last use has ended."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None


class Ring:
    """A fixed number of buffers, used in turn. Memory is allocated when it is first needed.

    The caller that takes a slot waits for its last use and stores its own event in the slot before
    another caller takes one: it holds `lock` meanwhile.

    Args:
        allocate: allocates memory of the given number of bytes.
        num_slots: the number of buffers, at least 1.
        slot_nbytes: the size of a new buffer, unless `take` needs more; also an attribute.
    """

    def __init__(self, allocate: Callable[[int], Memory], num_slots: int, slot_nbytes: int) -> None:
        self.lock = threading.Lock()
        self._allocate = allocate
        self._slots: list[Slot | None] = [None] * num_slots
        self.slot_nbytes = slot_nbytes
        self._next = 0

    def take(self, nbytes: int) -> Slot:
        """Returns the next slot, of at least `nbytes`. The caller holds `lock`.

        A slot that is too small is replaced by a larger one; that blocks until its last use has
        ended.
        """
        at = self._next
        self._next = (at + 1) % len(self._slots)
        slot = self._slots[at]
        if slot is None or slot.memory.nbytes < nbytes:
            if slot is not None:
                slot.wait()  # its memory is freed now
            slot = Slot(self._allocate(max(nbytes, self.slot_nbytes)))
            self._slots[at] = slot
        return slot


class _OnStream:
    """The stream that a copy runs on, and the objects that it uses there."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.keep: list[object] = []
        self.transfer = DONE


class Routes:
    """The routes of one device. Thread-safe.

    Each method submits a copy and returns it as a `Transfer`. A copy is ordered on the given
    stream, even if it runs on another one. After an exception some, all or none of the copy is done
    or running; the objects that it uses stay alive until it ends.

    Args:
        driver: the device.
        launcher: launches the kernels of the device.
        policy: the sizes of grids and buffers.
    """

    def __init__(self, driver: Driver, launcher: Launcher, policy: CopyPolicy) -> None:
        self._driver = driver
        self._launcher = launcher
        self._policy = policy
        slots = policy.num_slots, policy.slot_nbytes
        self._device_ring = Ring(driver.device_memory, *slots)
        self._host_ring = Ring(driver.host_memory, *slots)

    def by_kernel(
        self, copy: BlockCopy, direction: Direction, stream: Any, *, capturing: bool
    ) -> Transfer:
        """Copies with a kernel that reads and writes both sides; the only route in a graph.

        While a graph is captured, the result is `DONE`: the owner of the graph keeps the memory
        alive.
        """
        grid = Grid(stream, self._ctas(direction))
        if capturing:
            launch_copy(self._launcher, copy, grid)
            return DONE
        # The same as `_on` at less cost, as a step of an engine waits for this.
        keep: tuple[object, ...] = (copy.keep,)
        try:
            keep = launch_copy(self._launcher, copy, grid)
        finally:
            transfer = Transfer(self._driver.record(stream), keep)
        return transfer

    def by_dma(
        self, copy: BlockCopy, direction: Direction, runs: Descriptors, stream: Any
    ) -> Transfer:
        """Copies with the copy engines, run by run."""
        with self._beside(stream, direction) as used:
            used.keep += (copy.keep, runs)
            submit(self._driver, runs, _order(copy, direction), used.stream)
        return used.transfer

    def by_stage(self, copy: BlockCopy, direction: Direction, stream: Any) -> Transfer:
        """Copies through a device buffer.

        A kernel copies between blocks and buffer, the copy engines long runs between buffer and
        host.
        """
        staging = staging_of(copy, direction)
        at_once = max(1, self._device_ring.slot_nbytes // staging.nbytes)
        # One after the other on one stream: the link idles only during the kernels, which take a
        # fraction of the link's time.
        with self._beside(stream, direction) as used, self._device_ring.lock:
            used.keep.append(copy.keep)
            for start in range(0, len(copy), at_once):
                part = copy.part(start, start + at_once)
                slot = self._device_ring.take(staging.nbytes * len(part))
                slot.wait_on_stream(used.stream)
                used.keep.append(slot.memory)
                try:
                    first, second = staging.halves(part, slot.memory.address)
                    if direction is Direction.LOAD:
                        self._move(first, Direction.LOAD, used)
                        self._rearrange(second, used)
                    else:
                        self._rearrange(first, used)
                        self._move(second, Direction.STORE, used)
                finally:
                    slot.event = self._driver.record(used.stream)
        return used.transfer

    def by_bounce(
        self, copy: BlockCopy, direction: Direction, runs: Descriptors, stream: Any
    ) -> Transfer:
        """Copies through page-locked buffers, for pageable host memory. Blocks.

        The calling thread copies between buffers and host memory. A load returns when its source
        has been read, a store when everything has been written.
        """
        with self._beside(stream, direction) as used, self._host_ring.lock:
            used.keep.append(copy.keep)
            if direction is Direction.LOAD:
                self._bounce_in(runs, used)
            else:
                self._bounce_out(runs, used)
        return used.transfer

    def _bounce_in(self, runs: Descriptors, used: _OnStream) -> None:
        for portion in cut(runs, self._host_ring.slot_nbytes):
            slot = self._host_ring.take(portion.nbytes)
            slot.wait()
            in_slot = _packed(portion, slot)
            _copy_on_host(portion.sources, in_slot, portion.sizes)
            used.keep.append(slot.memory)
            moved = Descriptors(in_slot, portion.targets, portion.sizes)
            try:
                submit(self._driver, moved, AccessOrder.ANY, used.stream)
            finally:
                slot.event = self._driver.record(used.stream)

    def _bounce_out(self, runs: Descriptors, used: _OnStream) -> None:
        flying: list[tuple[Slot, Descriptors]] = []
        for portion in cut(runs, self._host_ring.slot_nbytes):
            if len(flying) == self._policy.num_slots:
                _land(*flying.pop(0))
            slot = self._host_ring.take(portion.nbytes)
            slot.wait()
            used.keep.append(slot.memory)
            moved = Descriptors(portion.sources, _packed(portion, slot), portion.sizes)
            try:
                submit(self._driver, moved, AccessOrder.STREAM, used.stream)
            finally:
                slot.event = self._driver.record(used.stream)
            flying.append((slot, Descriptors(moved.targets, portion.targets, portion.sizes)))
        for slot, landing in flying:
            _land(slot, landing)

    def _move(self, copy: BlockCopy, direction: Direction, used: _OnStream) -> None:
        runs = describe(copy)
        used.keep.append(runs)
        submit(self._driver, runs, _order(copy, direction), used.stream)

    def _rearrange(self, copy: BlockCopy, used: _OnStream) -> None:
        grid = Grid(used.stream, self._ctas(Direction.WITHIN))
        used.keep.append(launch_copy(self._launcher, copy, grid))

    def _ctas(self, direction: Direction) -> int:
        if direction is Direction.WITHIN:
            return self._driver.multiprocessors * self._policy.ctas_per_multiprocessor
        return self._policy.host_ctas

    @contextmanager
    def _beside(self, stream: Any, direction: Direction) -> Iterator[_OnStream]:
        """Yields `stream`, or a copy stream if it is the legacy default stream, which has no DMA.

        In both cases the copies run after the earlier work of `stream`, and before its later work.
        """
        if not self._driver.is_legacy_default(stream):
            with self._on(stream) as used:
                yield used
            return
        aside = self._driver.copy_stream("load" if direction is Direction.LOAD else "store")
        self._driver.record(stream).wait(aside)
        try:
            with self._on(aside) as used:
                yield used
        finally:
            used.transfer.wait_on(stream)

    @contextmanager
    def _on(self, stream: Any) -> Iterator[_OnStream]:
        used = _OnStream(stream)
        try:
            yield used
        finally:  # also behind the half of a copy that failed
            used.transfer = Transfer(self._driver.record(stream), tuple(used.keep))


def _order(copy: BlockCopy, direction: Direction) -> AccessOrder:
    # Only host memory that is complete may be read before earlier work of the stream has ended.
    early = direction is Direction.LOAD and copy.stable_source
    return AccessOrder.ANY if early else AccessOrder.STREAM


def _packed(portion: Descriptors, slot: Slot) -> Ids:
    return slot.memory.address + np.cumsum(portion.sizes) - portion.sizes


def _copy_on_host(sources: Ids, targets: Ids, sizes: Ids) -> None:
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, size)


def _land(slot: Slot, landing: Descriptors) -> None:
    slot.wait()
    _copy_on_host(landing.sources, landing.targets, landing.sizes)
