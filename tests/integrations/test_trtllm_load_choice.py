"""In TensorRT-LLM a prompt is computed if its load would take longer, by its own steps."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trtllm_interface as trt
from load_clock import Decisions, LoadClock, at_two_speeds
from trtllm_pair import Pair, T, a_prompt

SIZE = 45
LOADED = SIZE // T * T


@pytest.fixture
def runtime(classes, configured, tiny, clock: LoadClock) -> Iterator[Any]:
    """It has computed five prompts, which are in the store."""
    configured(load_decisions=True)
    with Pair(classes, tiny) as made:
        attachment = made.worker._attachment
        clock.set_in(attachment.choice)
        kv, access = made.kv, attachment._access

        def timed(tokens, at):
            clock.computes(1 / made.pool.shape[1])  # for each layer
            return kv(tokens, at)

        made.kv = timed
        tokens_of = lambda orders: sum(map(len, orders)) * T  # noqa: E731
        access.load_all = clock.times(access.load_all, tokens_of)
        for number in range(5):
            made.run(trt.Request(number, a_prompt(SIZE, seed=number)), 3)
        assert access.flush(60)
        yield made


def ask(runtime: Any, number: int, name: int) -> int:
    """Tokens of a prompt that were loaded."""
    return SIZE + 2 - runtime.run(trt.Request(name, a_prompt(SIZE, seed=number)), 3)


@at_two_speeds
def test_a_store_is_asked_while_it_is_faster(runtime, clock, token_s, asked, decided):
    clock.token_s = token_s
    seen = Decisions()
    assert [ask(runtime, one, 10 + one) for one in range(4)] == [LOADED * one for one in asked]
    assert seen() == decided


def test_without_decisions_a_slow_store_is_asked(classes, configured, tiny, clock):
    configured()
    with Pair(classes, tiny) as runtime:
        clock.set_in(runtime.worker._attachment.choice)
        for number in range(2):
            runtime.run(trt.Request(number, a_prompt(SIZE, seed=number)), 3)
        access = runtime.worker._attachment._access
        assert access.flush(60)
        access.load_all = clock.times(access.load_all, lambda _: 1e6)
        assert [ask(runtime, one % 2, 10 + one) for one in range(4)] == [LOADED] * 4


def test_where_steps_overlap_the_turn_after_the_next_ends_one(classes, configured, tiny, clock):
    configured(load_decisions=True)
    with Pair(classes, tiny) as runtime:
        attachment = runtime.worker._attachment
        attachment.llm_args.disable_overlap_scheduler = False
        attachment = type(attachment)(attachment.llm_args)
        clock.set_in(attachment.choice)
        recorded: list[tuple[int, float]] = []
        attachment.choice._steps = SimpleNamespace(
            record=lambda tokens, _, seconds: recorded.append((tokens, round(seconds, 6)))
        )
        for _ in range(2):
            for tokens in (100, 20, 3):
                attachment.begin_step(tokens, 0.0)
                # The results of the step before are taken now.
                clock.now += {100: 0.0, 20: 0.1, 3: 0.02}[tokens]
                attachment.end_turn()
            clock.now += 0.003
            attachment.end_turn()  # nothing was scheduled
            clock.now += 60.0
        assert recorded == [(100, 0.1), (20, 0.02), (3, 0.003)] * 2
