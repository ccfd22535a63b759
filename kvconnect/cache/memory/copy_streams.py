"""The order of copies on CUDA streams: what waits for what.

Two streams carry all copies of a device: `load` writes blocks on the device (and reads the host
tier), `store` reads them (and writes the host tier). Three rules make every copy read and write
what it would if all work ran one after the other:

1. a batch of orders comes behind all that the compute stream was given before the batch;
2. an order comes behind those of the same batch on the other stream that use one of its slots;
3. the compute stream continues behind all copies of the batch.

By 1 and 3, slots need to be remembered within a batch only: whatever was ordered before is behind
the compute stream. Nothing here waits on the calling thread, and nothing runs on the legacy default
stream, but events are recorded on it, and it waits for them, where it is the compute stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from kvconnect.kernels.cuda.driver.streams import copy_streams

__all__ = ["CopyStreams", "CudaStreams"]


class CudaStreams:
    """The streams of a CUDA device; tests bring a device that records instead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self, priority: int) -> torch.cuda.Stream:
        """One of the device's two, which all copies share; below 0: the one that goes first."""
        pair = copy_streams(self._device)
        return pair.load if priority < 0 else pair.store

    def current_stream(self) -> torch.cuda.Stream:
        """The stream that the calling thread computes on."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A new event behind all that `stream` was given so far."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """What `stream` is given from now on comes behind `event`."""
        stream.wait_event(event)

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
        """Give `stream` the copies that `work` enqueues; it runs at once, on that stream."""
        with torch.cuda.stream(stream):
            work()


class _CopyStream:
    """A copy stream, and what this batch gave it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.last: torch.cuda.Event | None = None
        self._events: list[torch.cuda.Event] = []
        self._users: dict[int, int] = {}

    def launched(self, event: torch.cuda.Event, slots: Iterable[int]) -> None:
        """`event` is behind a copy that uses `slots`."""
        self._users.update(dict.fromkeys(slots, len(self._events)))
        self._events.append(event)
        self.last = event

    def last_user(self, slots: Iterable[int]) -> torch.cuda.Event | None:
        """The event of this batch behind all copies that use any of `slots`."""
        # Those of one stream happen in order, so the newest stands for all.
        newest = max((self._users.get(slot, -1) for slot in slots), default=-1)
        return self._events[newest] if newest >= 0 else None

    def forget(self) -> None:
        """The batch is over."""
        self._events.clear()
        self._users.clear()


class CopyStreams:
    """The two copy streams of a device. Not thread-safe.

    A slot is a number for a stretch of memory, on the device or in the host tier: two copies that
    touch the same byte have a slot in common.
    """

    def __init__(self, device: CudaStreams) -> None:
        self._device = device
        self._load = _CopyStream(device.new_stream(-1))
        self._store = _CopyStream(device.new_stream(0))
        self._compute: torch.cuda.Stream | None = None
        self._depth = 0
        self._begun = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Orders within are one batch: loads and stores of different slots overlap.

        Until it ends the compute stream must not be given work that touches blocks, nor may another
        stream become current. Batches nest; an order outside of one is a batch of its own.
        """
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and self._begun:
                self._end()

    def load(self, copy: Callable[[], object], slots: list[int]) -> None:
        """Launch `copy`, which writes device slots and reads host slots, or device slots.

        Args:
            copy: enqueues the copies on the current stream.
            slots: what it writes, and what it reads of the host tier. (No store changes what is on
                the device.)
        """
        self._launch(self._load, self._store, copy, slots)

    def store(self, copy: Callable[[], object], slots: list[int]) -> None:
        """Launch `copy`, which reads device slots and writes host slots: `slots`, all of them."""
        self._launch(self._store, self._load, copy, slots)

    def _launch(
        self, copies: _CopyStream, other: _CopyStream, copy: Callable[[], object], slots: list[int]
    ) -> None:
        device = self._device
        with self.together():
            if not self._begun:
                self._begin()
            event = other.last_user(slots)
            if event is not None:
                device.wait(copies.stream, event)
            try:
                device.launch(copies.stream, copy)
            finally:  # also behind the half of a copy that failed
                copies.launched(device.record(copies.stream), slots)

    def _begin(self) -> None:
        compute = self._device.current_stream()
        if compute != self._compute:
            self._wait_for_copies(compute)
            self._compute = compute
        before = self._device.record(compute)
        for copies in (self._load, self._store):
            self._device.wait(copies.stream, before)
        self._begun = True

    def _end(self) -> None:
        if self._compute is not None:
            self._wait_for_copies(self._compute)
        for copies in (self._load, self._store):
            copies.forget()
        self._begun = False

    def _wait_for_copies(self, compute: torch.cuda.Stream) -> None:
        for copies in (self._load, self._store):
            if copies.last is not None:
                self._device.wait(compute, copies.last)
