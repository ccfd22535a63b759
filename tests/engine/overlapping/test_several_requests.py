"""Several requests while one of them computes beside its load; or anything at any time."""

from __future__ import annotations

import threading

import pytest
from beside import (
    ANY,
    FEW_SHARED,
    MANY_SHARED,
    PROMPT,
    PROMPTS,
    STORMY,
    Storm,
    T,
    nothing,
    slow,
    stop_at,
    whole_blocks,
)
from observed import words

from kvconnect import SamplingParams
from kvconnect.backends.guard.breaker import Breaker
from kvconnect.request import LlmRequest


def models(*names: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", names, indirect=True)


@models("llama")
def test_a_running_request_takes_the_blocks_of_one_whose_store_hangs(late):
    """The one that loads cannot go on without them either, but it came last."""
    llm = late.open(scheduling="max_utilization", cache={"max_tokens": 17 * T})
    long = SamplingParams(max_tokens=6 * T, ignore_eos=True)
    late.beside.decide = nothing
    late.hold(13)
    running = llm.submit(words(2 * T, 9), long)
    next(running.stream())
    loading = late.submit()
    assert len(running.result(timeout=60).output_token_ids) == 6 * T
    late.beside.decide = whole_blocks
    llm._thread._inbox.ring()
    late.check_tokens(loading.result(60))
    late.check_rest()


@models("mixed")
def test_a_running_request_is_not_preempted_for_one_that_loads(late):
    """The pool has room for both, if the second computes only as far as it may."""
    llm = late.open(cache={"max_tokens": 22 * T}, max_num_tokens=2 * T)
    long = SamplingParams(max_tokens=5 * T, ignore_eos=True)
    late.beside.decide = nothing
    other = words(2 * T, 9)
    running = llm.submit(other, long)
    next(running.stream())
    late.beside.decide = whole_blocks
    late.hold(11)
    loading = late.submit()
    first = running.result(60)
    late.store.release()
    assert first.preemptions == 0
    (expected,) = late.reference(late.model, [other], 5 * T)  # up to the end of the text
    assert list(first.output_token_ids)[: len(expected)] == expected
    late.check(loading.result(60))
    late.check_rest()


@pytest.mark.parametrize("other", [FEW_SHARED, MANY_SHARED])
@models("llama")
def test_one_that_begins_alike_while_the_first_loads(other, late):
    """It reuses what the first computed or loaded."""
    late.open()
    late.store.held = set().union(*late.keys[:6], *late.store.keys_at(other)[4:])
    reached = threading.Event()
    late.beside.decide = stop_at(4 * T, reached)
    first = late.submit()
    assert reached.wait(60)
    second = late.submit(other)
    late.beside.decide = whole_blocks
    late.check(first.result(60))
    output = second.result(60)
    late.check(output, other)
    assert output.reused_device_tokens >= min(4 * T, len(other) // T * T) - T
    late.check_rest()


@pytest.mark.parametrize("waits", [True, False])
@models("mixed", *slow("gpt_oss"))
def test_one_that_begins_alike(waits, late):
    """It waits if the whole load is of use to it.

    Not with windows alone: those need none of the blocks that are held.
    """
    llm, keys = late.open(), late.keys
    late.hold(6)
    other = [*PROMPT, *words(9, 5)] if waits else [*PROMPT[: 9 * T], *words(9, 5)]
    for key in keys[12]:
        del late.store.frames[key]
    reached = threading.Event()
    late.beside.decide = stop_at(3 * T, reached)
    first = late.submit()
    assert reached.wait(60)

    def decide(request: LlmRequest, budget: int) -> int:
        goes_on = waits or request.prompt_len == len(other)
        return whole_blocks(request, budget) if goes_on else 0

    late.beside.decide = decide
    output = late.submit(other).result(60)
    late.beside.decide = whole_blocks
    llm._thread._inbox.ring()
    late.check(first.result(60))
    late.check(output, other)
    assert output.reused_device_tokens == (12 * T if waits else 3 * T)
    late.check_rest()


INDEXED = ["bloom", "deepseek_v32", "hy_v4", "phimoe"]


@pytest.mark.parametrize("seed", [0, *slow(1)])
@pytest.mark.parametrize("kind", STORMY)
@models(*ANY, *slow(*INDEXED))
def test_whatever_happens_no_token_is_wrong_and_nothing_is_left(kind, seed, late, monkeypatch):
    monkeypatch.setattr(Breaker, "open", lambda *_: None)  # the store is asked all the time
    expected = dict(enumerate(late.reference(late.model, PROMPTS, 12)))
    late.store.writable = True
    storm = Storm(late.open(cache={"max_tokens": 34 * T}, **STORMY[kind]), late.store, late.beside)
    for number in range(400 if seed else 3):
        storm.run(1000 * seed + number, late.saved, expected)
