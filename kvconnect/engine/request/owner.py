"""The process that an engine's threads run in."""

from __future__ import annotations

import os

from kvconnect.errors import EngineClosed


class Owner:
    """The process that made this. A process forked from it has none of the engine's threads."""

    __slots__ = ("_process",)

    def __init__(self) -> None:
        self._process = os.getpid()

    def check(self) -> None:
        """Checks that this is the owner. In a forked process call it before any lock.

        The holder of a lock does not exist there.

        Raises:
            EngineClosed: this process was forked from the owner.
        """
        if os.getpid() != self._process:
            raise EngineClosed(
                f"the engine runs in process {self._process}, and this one, {os.getpid()}, was "
                "forked from it; make an LLM in this process"
            )
