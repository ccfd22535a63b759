"""Orders copies on CUDA streams: which work waits for which.

Two streams carry all copies of a device. `load` writes blocks on the device and reads the host
tier; `store` reads blocks on the device and writes the host tier. Three rules give every copy the
result that it would have if all work ran one after the other:

1. a batch runs after all work that was on the compute stream before the batch;
2. a copy runs after those of the same batch on the other stream that use one of its slots;
3. the compute stream continues after all copies of the batch.

By 1 and 3, slots need to be remembered within a batch only: all earlier copies precede the work of
the compute stream. No call blocks its thread, and no copy runs on the legacy default stream. If the
legacy default stream is the compute stream, it only records events and waits for events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from kvconnect.kernels.cuda.driver.streams import copy_streams


class CudaStreams:
    """The streams of a CUDA device; tests replace this class by one that records its calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self, priority: int) -> torch.cuda.Stream:
        """Returns one of the device's two shared copy streams: `load` for a negative `priority`."""
        pair = copy_streams(self._device)
        return pair.load if priority < 0 else pair.store

    def current_stream(self) -> torch.cuda.Stream:
        """Returns the stream that the calling thread computes on."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Returns a new event that happens after all work submitted to `stream` so far."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Makes later work of `stream` wait for `event`."""
        stream.wait_event(event)

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
        """Calls `work`, which enqueues copies, with `stream` as the current stream."""
        with torch.cuda.stream(stream):
            work()


class _CopyStream:
    """A copy stream, and its copies in the running batch."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.last: torch.cuda.Event | None = None
        self._events: list[torch.cuda.Event] = []
        self._users: dict[int, int] = {}

    def launched(self, event: torch.cuda.Event, slots: Iterable[int]) -> None:
        """Records that `event` follows a copy that uses `slots`."""
        self._users.update(dict.fromkeys(slots, len(self._events)))
        self._events.append(event)
        self.last = event

    def last_user(self, slots: Iterable[int]) -> torch.cuda.Event | None:
        """Returns the event of this batch after the last copy that uses any of `slots`, or None."""
        # The events of one stream happen in order, so the newest is enough.
        newest = max((self._users.get(slot, -1) for slot in slots), default=-1)
        return self._events[newest] if newest >= 0 else None

    def forget(self) -> None:
        """Ends the batch: removes the records of its copies."""
        self._events.clear()
        self._users.clear()


class CopyStreams:
    """The two copy streams of a device. Not thread-safe.

    A slot is the number of a piece of memory, on the device or in the host tier. Two copies that
    use the same byte have a common slot.
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
        """Makes the copies within the context one batch.

        Loads and stores of different slots overlap in a batch. Until the batch ends, the compute
        stream must get no work on blocks, and no other stream may become current. Batches nest. A
        copy outside of a batch is a batch of its own.
        """
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and self._begun:
                self._end()

    def load(self, copy: Callable[[], object], slots: list[int]) -> None:
        """Launches `copy`, which writes device slots and reads host slots or device slots.

        Args:
            copy: enqueues the copies on the current stream; called at once.
            slots: the slots that are written, and those of the host tier that are read. (No store
                changes device slots.)
        """
        self._launch(self._load, self._store, copy, slots)

    def store(self, copy: Callable[[], object], slots: list[int]) -> None:
        """Launches `copy`, which reads device slots and writes host slots, all of `slots`."""
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
