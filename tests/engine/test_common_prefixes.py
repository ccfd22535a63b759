"""Prompts at once that begin alike: what they have in common is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from observed import tokens, watch_batches, words

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.request import RequestState

THREE = SamplingParams(max_tokens=3, ignore_eos=True)
POLICIES = ["guaranteed_no_evict", "max_utilization"]


STEM = words(250, 0)
FIRST = STEM[:100] + words(20, 1)
SECOND = STEM[:100] + words(30, 2)
COMMON = 96  # six blocks of 16


def at_once(llm: LLM, count: int) -> list[list[tuple[int, int]]]:
    """The engine begins when `count` requests are there; (id, tokens) of every batch from then."""
    engine, batches = llm._engine, watch_batches(llm)
    step = engine.step
    engine.step = lambda: (len(engine._live) >= count or bool(batches)) and step()
    return batches


def check(outputs, expected: list[list[int]], computed: Sequence[int]) -> None:
    assert tokens(outputs) == expected
    assert [one.computed_tokens for one in outputs] == list(computed)


@pytest.mark.parametrize("scheduling", POLICIES)
def test_it_is_computed_once(open_llm, llama, reference, scheduling):
    llm = open_llm(llama, scheduling=scheduling)
    batches = at_once(llm, 2)
    outputs = llm.generate([FIRST, SECOND], THREE)
    check(outputs, reference(llama, [FIRST, SECOND], 3), [120, 130 - COMMON])
    # The second waits for what it shares, not for the rest of the first.
    assert batches[:2] == [[(0, COMMON)], [(0, 24), (1, 34)]]


def test_equal_prompts_of_whole_blocks(open_llm, llama, reference):
    llm = open_llm(llama)
    at_once(llm, 3)
    prompts = [STEM[:64]] * 3
    check(llm.generate(prompts, THREE), reference(llama, prompts, 3), [64, 1, 1])


@pytest.mark.parametrize("scheduling", POLICIES)
def test_only_within_one_namespace(open_llm, llama, reference, scheduling):
    llm = open_llm(llama, scheduling=scheduling)
    batches = at_once(llm, 4)
    prompts = [FIRST, SECOND, FIRST, SECOND]
    outputs = llm.generate(prompts, THREE, cache_salt=["a", "b", "b", None])
    # Only the third is of a namespace that another computes in.
    expected = reference(llama, prompts, 3)
    check(outputs, expected, [120, 130, 120 - COMMON, 130])
    assert sorted(batches[0]) == [(0, 120), (1, COMMON), (3, 130)]


def test_in_chunks(open_llm, llama, reference):
    llm = open_llm(llama, max_num_tokens=64)
    batches = at_once(llm, 2)
    prompts = [STEM[:230] + words(20, 1), STEM[:230] + words(25, 2)]
    outputs = llm.generate(prompts, THREE)
    check(outputs, reference(llama, prompts, 3), [250, 255 - 224])
    assert batches[:5] == [
        *([(0, 64)] for _ in range(3)),
        [(0, 224 - 3 * 64)],
        [(0, 250 - 224), (1, 255 - 224)],
    ]


@pytest.mark.parametrize("scheduling", POLICIES)
def test_three_in_a_chain(open_llm, llama, reference, scheduling):
    llm = open_llm(llama, scheduling=scheduling)
    batches = at_once(llm, 3)
    prompts = [STEM[:50], STEM[:100], STEM[:150]]
    outputs = llm.generate(prompts, THREE)
    check(outputs, reference(llama, prompts, 3), [50, 100 - 48, 150 - 96])
    assert [sorted(batch) for batch in batches[:3]] == [
        [(0, 48)],
        [(0, 2), (1, 48)],
        [(0, 1), (1, 4), (2, 54)],
    ]


def test_the_longest_first(open_llm, llama, reference):
    """Each of the others goes on as soon as its own part is there."""
    llm = open_llm(llama)
    batches = at_once(llm, 3)
    prompts = [STEM[:150], STEM[:100], STEM[:50]]
    outputs = llm.generate(prompts, THREE)
    check(outputs, reference(llama, prompts, 3), [150, 100 - 96, 50 - 48])
    assert [sorted(batch) for batch in batches[:3]] == [
        [(0, 48)],
        [(0, 48), (2, 2)],
        [(0, 54), (1, 4), (2, 1)],
    ]


def test_what_waits_holds_no_blocks(open_llm, llama):
    llm = open_llm(llama)
    held: list[tuple[RequestState, bool]] = []
    at_once(llm, 2)
    forward = llm._engine._forward

    def look(*step):
        holds = llm._engine._kv.blocks.holds
        held.extend((one.state, holds(one.request_id)) for one in llm._engine._scheduler.waiting)
        return forward(*step)

    llm._engine._forward = look
    llm.generate([FIRST, SECOND], THREE)
    assert held == [(RequestState.QUEUED, False)]


def between_steps(llm: LLM, act: Callable[[int], object]) -> None:
    """Call `act` with the number of each step after it."""
    step, done = llm._engine.step, iter(range(1000))

    def step_and_act():
        worked = step()
        if worked:
            act(next(done))
        return worked

    llm._engine.step = step_and_act


@pytest.mark.parametrize("scheduling", POLICIES)
@pytest.mark.parametrize("after", [0, 2, 4])
def test_the_first_is_aborted(open_llm, llama, reference, scheduling, after):
    llm = open_llm(llama, max_num_tokens=64, scheduling=scheduling)
    at_once(llm, 2)
    between_steps(llm, lambda number: number == after and llm._engine.abort(0))
    prompts = [STEM[:230] + words(20, 1), STEM[:230] + words(25, 2)]
    handles = [llm.submit(prompt, THREE) for prompt in prompts]
    assert handles[0].result(timeout=60).finish_reason == "abort"
    second = handles[1].result(timeout=60)
    expected = reference(llama, prompts, 3)[1]
    check([second], [expected], [255 - min(64 * (after + 1), 224)])


@pytest.mark.parametrize("after", [0, 2, 4])
def test_the_first_is_preempted(open_llm, llama, reference, after):
    llm = open_llm(llama, max_num_tokens=64)
    at_once(llm, 2)

    def preempt(number: int) -> None:
        if number == after:
            llm._engine._send_back(llm._engine._live[0].request)

    between_steps(llm, preempt)
    prompts = [STEM[:230] + words(20, 1), STEM[:230] + words(25, 2)]
    outputs = llm.generate(prompts, THREE)
    assert tokens(outputs) == reference(llama, prompts, 3)
    assert outputs[1].computed_tokens <= 255 - 224


@pytest.mark.parametrize("scheduling", POLICIES)
def test_others_go_on_meanwhile(open_llm, llama, reference, scheduling):
    llm = open_llm(llama, scheduling=scheduling)
    batches = at_once(llm, 3)
    prompts = [FIRST, SECOND, words(40, 3)]
    outputs = llm.generate(prompts, THREE)
    check(outputs, reference(llama, prompts, 3), [120, 130 - COMMON, 40])
    assert batches[0] == [(0, COMMON), (2, 40)]


@pytest.mark.parametrize("scheduling", POLICIES)
@pytest.mark.parametrize("scarce", [{"max_num_tokens": 260}, {"max_tokens": 18 * 16}])
def test_others_take_nothing_that_what_waits_will_need(open_llm, llama, scheduling, scarce):
    llm = open_llm(llama, scheduling=scheduling, **scarce)
    batches = at_once(llm, 3)
    llm.generate([FIRST, SECOND, words(40, 3)], THREE)
    assert batches[:2] == [[(0, COMMON)], [(0, 24), (1, 34), (2, 40)]] or (
        "max_tokens" in scarce and batches[:2] == [[(0, COMMON)], [(0, 24), (1, 34)]]
    )


def test_the_first_loads_what_they_share(open_llm, llama, reference, tmp_path):
    url = f"disk:{tmp_path}/kv?capacity=32MiB"
    with_store = open_llm(llama, connector=url)
    with_store.generate(STEM[:70], THREE)
    with_store.close()
    llm = open_llm(llama, connector=url)
    at_once(llm, 2)
    outputs = llm.generate([FIRST, SECOND], THREE)
    assert tokens(outputs) == reference(llama, [FIRST, SECOND], 3)
    assert all(one.computed_tokens <= one.prompt_tokens - 64 for one in outputs)


@pytest.mark.parametrize("arch", ["mistral", "gemma3"])
def test_with_sliding_windows(open_llm, model_of, reference, arch):
    llm = open_llm(model_of(arch))
    at_once(llm, 2)
    outputs = llm.generate([FIRST, SECOND], THREE)
    check(outputs, reference(model_of(arch), [FIRST, SECOND], 3), [120, 130 - COMMON])


def test_without_reuse_nobody_waits(open_llm, llama):
    config = KvCacheConfig(tokens_per_block=16, max_tokens=1024, enable_block_reuse=False)
    llm = open_llm(llama, kv_cache=config)
    batches = at_once(llm, 2)
    llm.generate([FIRST, SECOND], THREE)
    assert batches[0] == [(0, 120), (1, 130)]


@pytest.mark.parametrize("partial", [True, False])
def test_without_partial_reuse_only_whole_blocks_count(open_llm, llama, partial):
    """A block that both prompts end with is of no use to the second then."""
    config = KvCacheConfig(tokens_per_block=16, max_tokens=1024, enable_partial_reuse=partial)
    llm = open_llm(llama, kv_cache=config)
    batches = at_once(llm, 2)
    llm.generate([STEM[:16], STEM[:16]], THREE)
    assert batches[0] == ([(0, 16)] if partial else [(0, 16), (1, 16)])
