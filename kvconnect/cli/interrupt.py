"""SIGTERM as an exception, like Ctrl-C, so that ``with`` blocks close what they opened.

And Ctrl-C as a note, for a command that wants to come to an end of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "Terminated", "note_interrupt", "raise_on_sigterm"]


class Terminated(BaseException):
    """SIGTERM arrived. Like ``KeyboardInterrupt`` no ``except Exception`` catches it."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise `Terminated` in the block when SIGTERM arrives. Main thread only.

    A second one ends what the first began to close.
    """
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


class Interrupt:
    """Whether Ctrl-C was pressed in a `note_interrupt` block."""

    def __init__(self) -> None:
        self.noted = False


@contextmanager
def note_interrupt() -> Iterator[Interrupt]:
    """In the block the first Ctrl-C is noted only; a second one raises. Main thread only."""
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.noted:
            raise KeyboardInterrupt
        interrupt.noted = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
