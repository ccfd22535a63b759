"""The stream argument of a connector's worker: CUDA's, or on the CPU one that is always done."""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar

import torch


class Waitable(Protocol):
    """A stream or an event of any device."""

    def synchronize(self) -> None:
        """Blocks until the stream's work, or the event, is done."""


Event = TypeVar("Event")


class CpuEvent:
    """An event of a `CpuStream`, which has passed as soon as it is recorded."""

    def query(self) -> bool:
        """Returns True: the event has passed."""
        return True

    def record(self, stream: object = None) -> None:
        """Does nothing: all earlier work has run."""

    def synchronize(self) -> None:
        """Returns at once."""

    def wait(self, stream: object = None) -> None:
        """Returns at once."""


class CpuStream:
    """The order of work on the CPU, with the methods of ``torch.cuda.Stream``.

    Work on the CPU has run when its call returns, so no method waits for it. A wait for another
    device's work blocks the caller.

    Attributes:
        device: the CPU.
        cuda_stream: 0, CUDA's name for "no stream of its own".
    """

    device = torch.device("cpu")
    cuda_stream = 0

    def query(self) -> bool:
        """Returns True: all work has run."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""

    def wait_stream(self, stream: Waitable) -> None:
        """Blocks until the work given to `stream` so far is done; at once for a `CpuStream`."""
        stream.synchronize()

    def wait_event(self, event: Waitable) -> None:
        """Blocks until `event` is passed; at once if it is a `CpuEvent`."""
        event.synchronize()

    def record_event(self, event: Event | None = None) -> Event | CpuEvent:
        """Returns `event`, or a new one, which is passed already."""
        return CpuEvent() if event is None else event

    def __repr__(self) -> str:
        return "CpuStream()"


ForwardStream: TypeAlias = torch.cuda.Stream | CpuStream
"""The stream that the forward pass runs on."""


def cuda_stream(stream: ForwardStream | None) -> torch.cuda.Stream | None:
    """Returns `stream` if it is CUDA's, else ``None``."""
    return None if stream is None or isinstance(stream, CpuStream) else stream
