"""A prefix is reused up to a snapshot of the recurrent states, and answers are as without."""

from __future__ import annotations

import numpy as np
import pytest
from frame_store import cache, random_trees, reused
from observed import check_idle, slow, tokens, watch_batches

from kvconnect import SamplingParams
from kvconnect.engine.model.states import StateSlots

GREEDY = SamplingParams(max_tokens=12)

# ---------------------------------------------------------------- cold = restored


def test_the_next_turn_starts_from_the_answer(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache())
    turn = list(prompts[0])
    for _ in range(3):
        (output,) = llm.generate([turn], SamplingParams(max_tokens=20, ignore_eos=True))
        before = len(turn)
        turn += [*output.output_token_ids, 7, 8, 9]
    (last,) = llm.generate([turn], GREEDY)
    assert tokens([last]) == reference(tiny("qwen3_next"), [turn], 12)
    assert last.reused_device_tokens == (before + 19) // 16 * 16


def test_a_branch_leaves_a_snapshot_where_it_begins(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(state_interval=64))
    base = prompts[4]
    branches = [[*base[:50], 200 + index, 3, 4] for index in range(3)]
    llm.generate([base], GREEDY)
    outputs = [llm.generate([one], GREEDY)[0] for one in branches]
    assert tokens(outputs) == reference(tiny("qwen3_next"), branches, 12)
    assert reused(outputs) == [0, 48, 48]


def test_a_wrong_snapshot_changes_the_answer(tiny, open_llm, reference, prompts, monkeypatch):
    """Or none of these tests would see one."""
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache())
    llm.generate(prompts, GREEDY)
    monkeypatch.setattr(StateSlots, "copy_to", lambda *_: None)
    restore = StateSlots.restore

    def empty(self, request_id, num_tokens, snapshot):
        restore(self, request_id, num_tokens, {key: one * 0 for key, one in snapshot.items()})

    monkeypatch.setattr(StateSlots, "restore", empty)
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) != reference(tiny("qwen3_next"), prompts, 12)


# ---------------------------------------------------------------- settings


def test_chunks_end_where_a_snapshot_is_due(tiny, open_llm, prompts):
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache())
    batches = watch_batches(llm)
    llm.generate([prompts[4]], SamplingParams(max_tokens=1))
    assert [count for ((_, count),) in batches] == [32, 32, 32, 4]


def test_mixers_without_states_for_chunks_have_a_long_first_chunk(
    tiny, open_llm, reference, prompts
):
    llm = open_llm(tiny("mamba"), kv_cache=cache())
    batches = watch_batches(llm)
    once = SamplingParams(max_tokens=1)
    llm.generate([prompts[4]], once)
    assert [count for ((_, count),) in batches] == [96, 4]
    branch = [*prompts[4][:96], *prompts[0]]
    (output,) = llm.generate([branch], GREEDY)
    assert [count for ((_, count),) in batches[2:8]] == [32, 32, 6, 1, 1, 1]
    assert tokens([output]) == reference(tiny("mamba"), [branch], 12)
    assert output.reused_device_tokens == 96


def test_a_long_first_chunk_fills_a_budget_that_ends_with_a_snapshot(tiny, open_llm, prompts):
    """Or all tokens from the snapshot before would be computed one by one."""
    llm = open_llm(tiny("mamba"), kv_cache=cache(), max_num_tokens=64)
    batches = watch_batches(llm)
    llm.generate([prompts[4]], SamplingParams(max_tokens=1))
    assert [count for ((_, count),) in batches] == [64, 32, 4]


def test_undivided_prompts_have_their_snapshots_in_the_answer(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), enable_chunked_prefill=False)
    batches = watch_batches(llm)
    answer = SamplingParams(max_tokens=20, ignore_eos=True)
    (first,) = llm.generate([prompts[0]], answer)
    assert [count for ((_, count),) in batches] == [70] + [1] * 19
    turn = [*prompts[0], *first.output_token_ids, 5]
    (second,) = llm.generate([turn], GREEDY)
    assert tokens([second]) == reference(tiny("qwen3_next"), [turn], 12)
    assert second.reused_device_tokens == 80


def test_without_reuse_no_chunk_ends_early(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(enable_block_reuse=False))
    batches = watch_batches(llm)
    for _ in range(2):
        outputs = llm.generate([prompts[4]], GREEDY)
        assert tokens(outputs) == reference(tiny("qwen3_next"), [prompts[4]], 12)
        assert reused(outputs) == [0]
    assert batches[0] == [(0, 100)]


def test_prefilled_prompts_are_reused(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache())
    prompt = prompts[4][:96]  # whole blocks
    llm.generate([prompt], SamplingParams(max_tokens=0))
    outputs = llm.generate([prompt], GREEDY)
    assert tokens(outputs) == reference(tiny("qwen3_next"), [prompt], 12)
    assert reused(outputs) == [80]
    check_idle(llm)


def test_snapshots_go_to_the_host_tier_and_back(tiny, open_llm, reference, prompts):
    config = cache(max_tokens=160, host_cache_size=4 << 20)
    llm = open_llm(tiny("qwen3_next"), kv_cache=config, max_num_tokens=64)
    expected = reference(tiny("qwen3_next"), prompts, 12)
    for _ in range(2):
        outputs = [llm.generate([one], GREEDY)[0] for one in prompts]
        assert tokens(outputs) == expected
    assert sum(one.reused_host_tokens for one in outputs) > 0
    check_idle(llm)


# ---------------------------------------------------------------- random trees


@pytest.mark.parametrize("count", [60, *slow(1000)])
def test_random_trees_of_prompts(count, tiny, open_llm):
    """A small cache, whose snapshots are reclaimed, against an engine that computes all anew."""
    config = cache(max_tokens=256, tokens_per_block=4, state_interval=16)
    cached = open_llm(tiny("qwen3_next"), kv_cache=config, max_num_tokens=24)
    fresh = open_llm(tiny("qwen3_next"), kv_cache=cache(enable_block_reuse=False))
    outputs = random_trees(cached, fresh, np.random.default_rng(count), count)
    assert sum(reused(outputs)) > count
    check_idle(cached)
