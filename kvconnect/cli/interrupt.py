"""Turns SIGTERM into an exception, like Ctrl-C, so that ``with`` blocks close what they opened.

It also turns Ctrl-C into an event, for a command that ends by itself.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType


class Terminated(BaseException):
    """The exception of SIGTERM. Like ``KeyboardInterrupt`` no ``except Exception`` catches it."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raises `Terminated` in the block when SIGTERM arrives. Main thread only.

    A second SIGTERM interrupts the closing that the first one began.
    """
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def note_interrupt() -> Iterator[Event]:
    """Sets the event at the first Ctrl-C in the block; a second one raises. Main thread only."""
    interrupt = Event()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
