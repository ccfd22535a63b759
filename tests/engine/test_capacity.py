"""``max_utilization``: more at once than fits to the end; the last admitted make room again."""

from __future__ import annotations

import numpy as np
import pytest
from observed import slow, tokens, watch_batches

from kvconnect import SamplingParams
from kvconnect.errors import ConfigurationError, OutOfBlocks

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
FULL = "max_utilization"


def preempted_from(llm):
    """Who was preempted, and who ran then, in order of admission."""
    seen: list[tuple[int, list[int]]] = []
    send_back = llm._engine._send_back

    def watched(request):
        running = [one.request_id for one in llm._engine._scheduler.running]
        seen.append((request.request_id, running))
        send_back(request)

    llm._engine._send_back = watched
    return seen


@pytest.fixture
def four():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, 30).tolist() for _ in range(4)]


def test_a_request_is_admitted_as_soon_as_its_prompt_fits(open_llm, llama, four):
    # Eight blocks: each holds two at first and four at its end.
    careful, full = (
        open_llm(llama, max_tokens=128),
        open_llm(llama, max_tokens=128, scheduling=FULL),
    )
    few, more = watch_batches(careful), watch_batches(full)
    assert tokens(careful.generate(four, GREEDY)) == tokens(full.generate(four, GREEDY))
    assert (max(map(len, few)), max(map(len, more))) == (2, 4)
    assert careful.stats().preemptions == 0
    assert full.stats().preemptions >= 2


def test_the_last_admitted_makes_room_and_the_first_never_does(open_llm, llama, four):
    llm = open_llm(llama, max_tokens=128, scheduling=FULL)
    seen = preempted_from(llm)
    llm.generate(four, GREEDY)
    assert seen
    assert all(victim == running[-1] and len(running) > 1 for victim, running in seen)


def test_what_it_computed_is_reused_when_it_comes_back(open_llm, llama, four):
    # Seven blocks: when the first takes its fourth, the second has three and gives them up.
    llm = open_llm(llama, max_tokens=112, scheduling=FULL)
    first, second = llm.generate(four[:2], GREEDY)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.reused_device_tokens == 48
    stats = llm.stats()
    assert stats.preemptions == 1
    assert stats.free_blocks == stats.max_blocks
    llm._engine._kv.blocks.check_invariants()


@pytest.mark.parametrize(
    ("connector", "max_num_tokens"),
    [
        (None, 2048),
        ("memory:?capacity=32MiB", 24),
        *slow((None, 24)),
        *slow(("memory:?capacity=32MiB", 2048)),
    ],
)
def test_greedy_answers_are_those_of_transformers(
    connector, max_num_tokens, open_llm, llama, reference, prompts
):
    llm = open_llm(
        llama,
        max_tokens=160,
        scheduling=FULL,
        connector=connector,
        max_num_tokens=max_num_tokens,
    )
    for _ in range(2):
        outputs = llm.generate(prompts * 2, SamplingParams(max_tokens=20))
        assert tokens(outputs) == reference(llama, prompts * 2, 20)
    assert llm.stats().preemptions > 0


def test_samples_and_stop_strings_are_the_same(open_llm, llama, four):
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=True, stop=("a", "ee"))
        for seed in range(4)
    ]
    roomy = open_llm(llama).generate(four, params)
    llm = open_llm(llama, max_tokens=112, scheduling=FULL)
    crowded = llm.generate(four, params)
    assert [(one.output_token_ids, one.output_text, one.finish_reason) for one in crowded] == [
        (one.output_token_ids, one.output_text, one.finish_reason) for one in roomy
    ]
    assert llm.stats().preemptions > 0


def test_nothing_is_streamed_twice(open_llm, llama, four):
    llm = open_llm(llama, max_tokens=128, scheduling=FULL)
    handles = [llm.submit(prompt, GREEDY) for prompt in four]
    streamed = [[t for chunk in one.stream() for t in chunk.token_ids] for one in handles]
    assert streamed == tokens(one.result() for one in handles)
    assert llm.stats().preemptions > 0


def test_a_store_is_told_and_keeps_what_the_device_loses(open_llm, llama, four):
    llm = open_llm(llama, max_tokens=128, scheduling=FULL, connector="memory:?capacity=32MiB")
    told: list[int] = []
    reset = llm._engine._connector.request_reset
    llm._engine._connector.request_reset = lambda one: told.append(one.request_id) or reset(one)
    outputs = llm.generate(four, GREEDY)
    assert tokens(outputs) == tokens(open_llm(llama).generate(four, GREEDY))
    assert len(told) == llm.stats().preemptions > 0


def test_one_that_cannot_go_on_even_alone_fails_and_others_go_on(open_llm, llama, four):
    llm = open_llm(llama, max_tokens=128, scheduling=FULL)
    # Somebody holds blocks for good, which no request can know.
    llm._engine._kv.blocks.add_sequence(10**6, [1] * 16 * 5)
    with pytest.raises(OutOfBlocks, match=r"request 0 needs 1 KV blocks; 0 are free though"):
        llm.generate(four[0], GREEDY)
    short = SamplingParams(max_tokens=5, ignore_eos=True)
    assert len(llm.generate(four[1], short)[0].output_token_ids) == 5
    stats = llm.stats()
    assert (stats.running_requests, stats.waiting_requests, stats.free_blocks) == (0, 0, 3)


def test_an_unknown_policy_is_refused(open_llm, llama):
    with pytest.raises(ConfigurationError, match="scheduling: 'max_utilisation' is unknown; did"):
        open_llm(llama, scheduling="max_utilisation")
