"""A pause in a step of vLLM's scheduler, for the store's threads."""

from __future__ import annotations

import threading
import time

# The seconds that a step leaves the interpreter to the store's threads if a request waits for them;
# and the most seconds in a step that computes no token.
_YIELD_S = 0.0001
_IDLE_S = 0.003
# Steps that follow each other within this time compute nothing. vLLM does not show that.
_SHORT_S = 0.002


class StepPause:
    """Lets the store's threads run while requests wait for their results.

    An engine core in its client's process repeats steps at once while it has nothing to compute.
    Other threads would get the interpreter only every 5 ms.
    """

    def __init__(self) -> None:
        self._news = threading.Event()
        self._ended_at = 0.0

    def tell(self) -> None:
        """Ends a pause, as there is a result that requests wait for. Any thread may call this."""
        self._news.set()

    def end_step(self, *, waits: bool) -> None:
        """Blocks for a moment if a request `waits`; called once in each step."""
        if waits:
            is_idle = time.monotonic() - self._ended_at < _SHORT_S
            self._news.wait(_IDLE_S if is_idle else _YIELD_S)
            self._news.clear()  # the next step reads the present results
        self._ended_at = time.monotonic()
