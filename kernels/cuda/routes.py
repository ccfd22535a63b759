"""Copies blocks between a device and host memory, by each of the routes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvconnect.kernels.blocks.block_ids import Ids
from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.cuda.copy_policy import CopyPolicy, Direction
from kvconnect.kernels.cuda.dma import cut, describe, submit
from kvconnect.kernels.cuda.driver.interface import AccessOrder, Descriptors, Driver
from kvconnect.kernels.cuda.launch.launcher import Grid, Launcher
from kvconnect.kernels.cuda.launch.runs import launch_copy
from kvconnect.kernels.cuda.staging import Ring, Slot, staging_of

__all__ = ["Routes"]


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
