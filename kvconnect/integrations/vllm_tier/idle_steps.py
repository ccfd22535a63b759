"""Steps of vLLM that compute nothing, while requests wait for the store."""

from __future__ import annotations

import sys
import threading
from types import FrameType

__all__ = ["IdleSteps"]

_WAIT_S = 0.001


class IdleSteps:
    """Waits for the store where vLLM's loop would only turn.

    An engine in the process of its client goes from step to step at once while all of its requests
    wait for the store, and leaves the interpreter to no other thread meanwhile: the store's would
    get it every 5 ms, and an answer of a hundred rows would be late.
    """

    def __init__(self) -> None:
        self._news = threading.Event()

    def tell(self) -> None:
        """The store has answered something. On any thread."""
        self._news.set()

    def wait(self) -> None:
        """Block until the store answers, at most for a millisecond, if this step computes nothing.

        On the scheduler's thread, inside the call that ends a step's scheduling.
        """
        if _computes_nothing():
            self._news.wait(_WAIT_S)
        self._news.clear()


def _computes_nothing() -> bool:
    """Whether the step whose scheduling ends has no tokens; False where vLLM does not show that.

    A tier is not told, so the connector that calls it is looked at.
    """
    caller: FrameType | None = sys._getframe(1)  # noqa: SLF001  the only way to a caller's names
    while caller is not None:
        if caller.f_code.co_name == "build_connector_meta":
            output = caller.f_locals.get("scheduler_output")
            return getattr(output, "total_num_scheduled_tokens", 1) == 0
        caller = caller.f_back
    return False
