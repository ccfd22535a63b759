"""What tests see of an engine and do to it: its answers, its batches, preemption, its store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from kvconnect import LLM, KvCacheConnectorConfig, RequestOutput, SamplingParams
from kvconnect.backend import Backend
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest


def tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """The tokens of these answers."""
    return [list(output.output_token_ids) for output in outputs]


def slow(*values: object) -> list[ParameterSet]:
    """Parameters, or tuples of some, of the long form alone."""
    each = (one if isinstance(one, tuple) else (one,) for one in values)
    return [pytest.param(*one, marks=pytest.mark.slow) for one in each]


def words(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def request_of(
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    *,
    number: int = 0,
    tokens_per_block: int = 16,
) -> LlmRequest:
    """A request as the engine makes it of a prompt."""
    return LlmRequest(
        number,
        np.array(prompt, np.int32),
        chain_root=BlockKey(bytes(32)),
        tokens_per_block=tokens_per_block,
        sampling_params=params or SamplingParams(),
    )


def check_idle(llm: LLM) -> None:
    """The engine holds nothing of any request."""
    stats = llm.stats()
    assert stats.free_blocks == stats.max_blocks
    llm._engine._kv.blocks.check_invariants()


def check_rest(llm: LLM) -> None:
    """The engine holds nothing of any request, once the last saves and loads have ended."""
    until = time.monotonic() + 60
    while not llm.reset_prefix_cache():
        assert time.monotonic() < until
    check_idle(llm)


def patient(store: str | Backend | None, **more: object) -> KvCacheConnectorConfig:
    """A store that is waited for, on a busy machine too; nothing is computed beside its loads.

    A late lookup would be a miss, and what is computed beside a load would not count as loaded.
    """
    where = {"backend": store} if isinstance(store, Backend) else {"url": store}
    given = {"lookup_timeout_ms": 60_000, "load_timeout_s": 60, "overlap_loads": False}
    return KvCacheConnectorConfig(**where | given | more)


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


def preempt(llm: LLM, when: Callable[[LlmRequest], bool], *, once: bool = False) -> list[int]:
    """Sends requests back to the queue right after steps in which `when(request)` holds.

    With `once` no request is sent back twice with the same number of generated tokens. Without
    reuse it would pass the same steps for ever.
    """
    engine, sent = llm._engine, []
    step, seen = engine.step, set()

    def step_and_preempt() -> bool:
        worked = step()
        for request in list(engine._scheduler.running):
            at = (request.request_id, request.num_generated_tokens)
            if when(request) and not (once and at in seen):
                seen.add(at)
                sent.append(request.request_id)
                engine._send_back(request)
        return worked

    engine.step = step_and_preempt
    return sent
