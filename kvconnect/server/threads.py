"""The threads of a server, by what they do: none of it waits for the rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

__all__ = ["ServerThreads"]

_TOKENIZING = 4
_TELLING = 2


class ServerThreads:
    """What blocks, or takes long, beside the event loop. A context manager, which ends them.

    Attributes:
        parsing: where long bodies are parsed, one after the other: others would only take turns.
        tokenizing: where text becomes tokens, and requests are started.
        telling: where metrics are collected; slow stores may take half a second each to tell of
            themselves.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.parsing = self._pool("parsing", 1)
        self.tokenizing = self._pool("tokenizing", _TOKENIZING)
        self.telling = self._pool("telling", _TELLING)

    def _pool(self, what: str, threads: int) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvconnect-server-{what}")
        return self._stack.enter_context(pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
