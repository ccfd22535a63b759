"""Runs a verb's coroutine to its end, wherever it is called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvconnect.backends.main_loop import main_loop, run_to_end

__all__ = ["run_anywhere"]

T = TypeVar("T")

_END_S = 5.0


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on an event loop of its own and returns its result; blocks the caller.

    On the main thread Ctrl-C cancels `work`. Where an event loop runs already, as in a notebook,
    `work` runs on another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if threading.current_thread() is threading.main_thread():
            return run_to_end(work)
        return _run(work)
    with ThreadPoolExecutor(1, "kvconnect-verb") as thread:
        return thread.submit(_run, work).result()


def _run(work: Coroutine[Any, Any, T]) -> T:
    with main_loop(_END_S) as loop:
        return loop.run_until_complete(work)
