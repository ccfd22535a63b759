"""An event loop for a program's main thread, which ends even if a store is stuck."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from kvconnect.backends.daemon_threads import DaemonThreads

T = TypeVar("T")

_THREADS = 16
_END_S = 5.0


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` like ``asyncio.run``, but never waits for a stuck thread. Main thread only.

    Ctrl-C cancels `work`, as does an exception of another signal handler. Calls that have not ended
    some seconds later, such as a read from a stuck network mount, are abandoned on daemon threads.
    """
    with main_loop(_END_S) as loop, _woken_by_signals(loop):
        # Closing the runner would wait for tasks that never end: the context does it instead.
        return asyncio.Runner(loop_factory=lambda: loop).run(work)


@contextlib.contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Makes every signal wake `loop`.

    Python calls a handler between two bytecodes. Without this, a signal that arrives just before
    the loop waits, or on another thread, is handled only when something else wakes the loop.
    """
    receiving, sending = socket.socketpair()
    with receiving, sending:
        receiving.settimeout(0)
        sending.settimeout(0)  # required by `set_wakeup_fd`
        loop.add_reader(receiving, receiving.recv, 4096)
        earlier = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier)
            loop.remove_reader(receiving)


@contextlib.contextmanager
def main_loop(end_s: float) -> Iterator[asyncio.AbstractEventLoop]:
    """Yields a new loop. On exit cancels its tasks, and waits at most `end_s` seconds for them.

    ``asyncio.to_thread`` runs on daemon threads: stuck ones do not keep the process from ending.
    """
    loop = asyncio.new_event_loop()
    threads = DaemonThreads(_THREADS, "kvconnect-main")
    loop.set_default_executor(threads)
    try:
        yield loop
    finally:
        try:
            _end(loop, end_s)
            threads.end(end_s / 4)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _end(loop: asyncio.AbstractEventLoop, end_s: float) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=end_s))
    for _ in range(3):  # transports that were closed last need it to close their sockets
        loop.run_until_complete(asyncio.sleep(0))
    with contextlib.suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), end_s / 4))
    if not all(task.done() for task in tasks):  # abandoned tasks: no warnings about them
        loop.set_exception_handler(lambda *_: None)
