"""A process that answers commands: the methods of an object that is made there."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from frozen import freeze

_CONTEXT = multiprocessing.get_context("forkserver")


class Commanded:
    """Starts a process; `ask` calls a method there of what ``make(*arguments)`` has made.

    `make` and the methods may be coroutine functions. An error ends the process; `ask` raises it.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        self._lock = threading.Lock()
        self._commands, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_main, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.end()
            raise

    def ask(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            self._commands.send((method, arguments))
            return self._answer()

    def _answer(self) -> Any:
        if not self._commands.poll(60):
            raise TimeoutError("the process said nothing for 60 s")
        answer = self._commands.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def freeze(self) -> None:
        freeze(self.process.pid)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)

    def end(self) -> None:
        """Kills it, frozen or not."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(60)
        self._commands.close()


def _main(commands: Connection, make: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        asyncio.run(_serve(commands, make, arguments))
    except EOFError:
        os._exit(0)
    except Exception as error:  # noqa: BLE001 - the test raises it
        commands.send(error)
        os._exit(1)


async def _serve(
    commands: Connection, make: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    served = await _result(make(*arguments))
    commands.send(None)
    while True:
        method, given = await asyncio.to_thread(commands.recv)
        commands.send(await _result(getattr(served, method)(*given)))


async def _result(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer
