"""What tests see of an engine: its answers, its batches, forward passes that wait for a test."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvconnect import LLM, RequestOutput


def tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """The tokens of these answers."""
    return [list(output.output_token_ids) for output in outputs]


def check_idle(llm: LLM) -> None:
    """The engine holds nothing of any request."""
    stats = llm.stats()
    assert stats.free_blocks == stats.max_blocks
    llm._engine._kv.blocks.check_invariants()


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


def watch_batches(llm: LLM) -> list[list[tuple[int, int]]]:
    """The engine's batches from now on: (request id, scheduled tokens) of their requests."""
    batches: list[list[tuple[int, int]]] = []
    schedule = llm._engine._scheduler.schedule

    def watched():
        batch = schedule()
        if batch.requests:
            batches.append([(one.request_id, one.num_scheduled_tokens) for one in batch.requests])
        return batch

    llm._engine._scheduler.schedule = watched
    return batches


def preempt(llm, when):
    """Sends requests back to the queue right after steps in which `when(request)` holds."""
    engine, sent = llm._engine, []
    step = engine.step

    def step_and_preempt():
        worked = step()
        for request in list(engine._scheduler.running):
            if when(request):
                sent.append(request.request_id)
                engine._send_back(request)
        return worked

    engine.step = step_and_preempt
    return sent
