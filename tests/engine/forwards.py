"""Forward passes of an engine that wait until a test lets them go on."""

from __future__ import annotations

import threading

from kvconnect import LLM


def hold_forwards(llm: LLM) -> tuple[threading.Event, threading.Event]:
    """The engine stops before its next forward pass until the first event is set.

    The second is set when it has come there.
    """
    gate, reached = threading.Event(), threading.Event()
    forward = llm._engine._model.forward

    def held(step):
        reached.set()
        assert gate.wait(60)
        return forward(step)

    llm._engine._model.forward = held
    return gate, reached
