"""Copies between the memory store's region and its callers' buffers, beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvconnect.backends.running_threads import running_threads

__all__ = ["Copies", "MemoryCopier"]

Copies: TypeAlias = Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
"""Pairs of source and target, equally long."""

# Copying less than this takes less time than handing it to a thread.
_INLINE_NBYTES = 1 << 20


class MemoryCopier:
    """Two threads that copy, in the order of the calls.

    Each call is halved: one thread alone does not get all that memory gives. What is in the queue
    keeps both busy while a call's end reaches the event loop, and the next call comes from there.
    """

    def __init__(self) -> None:
        self._threads = running_threads(2, "kvconnect-memory")

    async def copy(self, copies: Copies) -> None:
        """Do all of `copies`. If this is cancelled, they go on."""
        nbytes = sum(source.nbytes for source, _ in copies)
        if nbytes <= _INLINE_NBYTES:
            _copy(copies)
            return
        ended = _Ended(asyncio.get_running_loop(), 2)
        for half in _halves(copies, nbytes // 2):
            self._threads.submit(_copy, half).add_done_callback(ended)
        await ended.future

    def close(self) -> None:
        """End the threads once nothing is left to copy, which is soon."""
        self._threads.shutdown()


class _Ended:
    """Tells the event loop once that all of `left` pieces have ended; that is what costs time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._left = left
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self, piece: Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            self._error = piece.exception() or self._error
            if self._left:
                return
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if self.future.done():
            return  # cancelled
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)


def _halves(copies: Copies, left: int) -> tuple[Copies, Copies]:
    first: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
    for index, (source, target) in enumerate(copies):
        if source.nbytes > left:
            first.append((source[:left], target[:left]))
            return first, [(source[left:], target[left:]), *copies[index + 1 :]]
        first.append((source, target))
        left -= source.nbytes
    return first, []


def _copy(copies: Copies) -> None:
    # memcpy on this thread, without the interpreter's lock. torch would share the copy with threads
    # of its own: slower than memcpy on one, and far slower where the cores are busy.
    for source, target in copies:
        np.copyto(target, source)
