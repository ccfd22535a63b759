"""The threads of a server, separated so that no kind of work waits for another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

_TOKENIZING = 4
_TELLING = 2
_SENDING = 4


class ServerThreads:
    """The threads for blocking or long work beside the event loop; a context manager.

    Leaving the context ends the threads.

    Attributes:
        parsing: the thread that parses long bodies. One thread, because Python runs only one at a
            time.
        tokenizing: the threads that tokenize text and start requests.
        verbs: the thread that performs the verbs on stored prompts, one after the other.
        sending: the threads that make exports, each as fast as its client reads.
        telling: the thread that collects metrics; each slow store may take half a second to report.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.parsing = self._pool("parsing", 1)
        self.tokenizing = self._pool("tokenizing", _TOKENIZING)
        self.telling = self._pool("telling", _TELLING)
        self.sending = self._pool("sending", _SENDING)
        self.verbs = self._pool("verbs", 1)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the threads are about to end."""
        self._stack.callback(callback)

    def _pool(self, what: str, threads: int) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvconnect-server-{what}")
        return self._stack.enter_context(pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
