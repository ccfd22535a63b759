"""Engines that are still open when the interpreter exits are closed, so that their stores drain."""

from __future__ import annotations

# Imported for its order: it stops all executors at exit, and what is registered later runs earlier.
import concurrent.futures.thread  # noqa: F401
import threading
import weakref
from typing import Protocol

__all__ = ["close_at_exit"]


class _Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(engine: _Closable) -> None:
    """Call ``engine.close()`` at a normal exit, if it is still referenced then."""
    _open.add(engine)


def _close_all() -> None:
    for engine in list(_open):
        engine.close()


# `atexit` is too late: executors take no more work then, and a store may need one to drain.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # noqa: SLF001
