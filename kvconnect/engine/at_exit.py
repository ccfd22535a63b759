"""Closes engines that are still open when the interpreter exits, so that their stores drain."""

from __future__ import annotations

# Imported first: it stops all executors at exit, and functions registered later run earlier.
import concurrent.futures.thread  # noqa: F401
import logging
import threading
import weakref
from typing import Protocol

_log = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(engine: _Closable) -> None:
    """Registers ``engine.close()`` for a normal exit, if it is still referenced then."""
    _open.add(engine)


def _close_all() -> None:
    for engine in list(_open):
        try:
            engine.close()
        except Exception as error:  # noqa: BLE001  the others are to be closed, too
            _log.error("an engine did not close at exit: %s", error, exc_info=error)


# `atexit` is too late: executors refuse work by then, and a store may need one to drain.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # noqa: SLF001
