"""SIGTERM as an exception, like Ctrl-C, so that ``with`` blocks close what they opened."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "raise_on_sigterm"]


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
