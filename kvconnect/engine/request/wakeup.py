"""How the engine's thread wakes a coroutine."""

from __future__ import annotations

import asyncio
import contextlib

__all__ = ["Wakeup"]


class Wakeup:
    """A bell that any thread rings, and that one coroutine of `loop` waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake the coroutine, or keep it from sleeping next time. Never blocks, never raises."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: no coroutine waits
            self._loop.call_soon_threadsafe(self._rung.set)

    async def wait(self) -> None:
        """Wait for a ring since the last wait."""
        await self._rung.wait()
        self._rung.clear()
