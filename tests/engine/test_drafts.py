"""Prompt lookup: fewer steps, the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import check_idle, slow, tokens, watch_batches
from parrot import EAGER, Parrot, draft_with

from kvconnect import SamplingParams
from kvconnect.engine.sampling.drafts import NgramDrafter, NgramSpeculation, accepted_run
from kvconnect.errors import ConfigurationError

T = 16
# Rotated positions, windows, learned positions, keys and values of different sizes.
ARCHITECTURES = [
    *("llama", "gemma3", "gpt2", "deepseek_v3"),
    *slow("qwen3", "mistral"),
]


def ints(*values):
    return np.array(values, np.int32)


def propose(tokens, limit=99, **settings):
    return NgramDrafter(NgramSpeculation(**settings)).propose(ints(*tokens), limit).tolist()


# ---------------------------------------------------------------- what is proposed


def test_what_followed_the_same_words_before():
    assert propose([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3], num_draft_tokens=4) == [4, 5, 6, 7]


def test_the_longest_run_wins_then_the_latest_place():
    seen = [1, 2, 3, 7, 0, 2, 3, 8, 9, 2, 3, 6, 0, 1, 2, 3]
    assert propose(seen, num_draft_tokens=1) == [7]
    assert propose(seen, num_draft_tokens=1, max_ngram_size=2) == [6]


def test_what_repeats_goes_on_repeating():
    assert propose([5, 1, 2, 1, 2], num_draft_tokens=5) == [1, 2, 1, 2, 1]


def test_nothing_is_proposed_where_nothing_like_it_occurred():
    assert propose([1, 2, 3, 4]) == []
    assert propose([1]) == []
    assert propose([1, 7, 3, 7]) == []  # shorter than min_ngram_size
    assert propose([1, 7, 3, 7], min_ngram_size=1, num_draft_tokens=1) == [3]


@pytest.mark.parametrize("limit", [-1, 0, 2])
def test_no_more_than_the_limit(limit):
    assert len(propose([1, 2, 3, 4, 5, 1, 2], limit)) == max(limit, 0)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_it_is_what_a_search_by_hand_finds(history, count, smallest, more):
    largest = smallest + more - 1
    expected: list[int] = []
    for size in range(min(largest, len(history) - 1), smallest - 1, -1):
        ends = [
            end for end in range(size, len(history)) if history[end - size : end] == history[-size:]
        ]
        if ends:
            rest = history[ends[-1] :]
            expected = (rest * count)[:count]
            break
    settings = {"min_ngram_size": smallest, "max_ngram_size": largest}
    assert propose(history, num_draft_tokens=count, **settings) == expected


def test_a_run_ends_behind_the_first_wrong_draft():
    assert accepted_run(ints(), [4]) == [4]
    assert accepted_run(ints(4, 5, 6), [4, 5, 6, 7]) == [4, 5, 6, 7]
    assert accepted_run(ints(4, 9, 6), [4, 5, 6, 7]) == [4, 5]
    assert accepted_run(ints(9, 5, 6), [4, 5, 6, 7]) == [4]


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_answers_are_those_of_plain_greedy_decoding(
    arch, model_of, open_llm, reference, prompts
):
    model = model_of(arch)
    several = [*prompts[:4], prompts[2] * 6, [7, 8, 9] * 11]
    expected = reference(model, several, 30)
    llm = open_llm(model, max_tokens=2048, speculative=EAGER)
    params = SamplingParams(max_tokens=30)
    assert tokens(llm.generate(several, params)) == expected
    assert llm.stats().drafted_tokens > 50
    whole = [prompt + answer for prompt, answer in zip(several, expected, strict=True)]
    for wrong_every in (0, 3):  # on what the first time published
        draft_with(llm, Parrot(whole, wrong_every))
        assert tokens(llm.generate(several, params)) == expected
    check_idle(llm)


@pytest.mark.parametrize(("tokens_per_block", "wrong_every"), [(2, 5), (16, 2), (4, 0)])
def test_drafts_across_blocks_in_memory_full_of_rubbish(
    tokens_per_block, wrong_every, llama, open_llm, reference, prompts
):
    import torch

    llm = open_llm(llama, tokens_per_block=tokens_per_block, max_tokens=2048, speculative=EAGER)
    llm._engine._kv.pool_tensor().fill_(torch.nan)
    expected = reference(llama, prompts, 30)
    whole = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    draft_with(llm, Parrot(whole, wrong_every, count=7, pause=24))
    for _ in range(2):
        assert tokens(llm.generate(prompts, SamplingParams(max_tokens=30))) == expected


def test_rejected_drafts_leave_the_cache_before_the_step_is_over(llama, open_llm, reference):
    prompt = [5] * 20
    (answer,) = reference(llama, [prompt], 30)
    llm = open_llm(llama, tokens_per_block=2, speculative=EAGER)
    draft_with(llm, Parrot([prompt + answer], wrong_every=3))
    engine, told = llm._engine, []
    engine._connector.on_rewind = lambda request: told.append(request.request_id)
    update = engine._kv.update_resources

    def watched(batch):
        for request in batch.generation_requests:
            # The last token was not fed yet.
            assert engine._kv.blocks.num_tokens(request.request_id) == request.num_tokens - 1
            assert request.num_computed_tokens == request.num_tokens - 1
        update(batch)

    engine._kv.update_resources = watched
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=30))
    assert list(output.output_token_ids) == answer
    assert len(told) > 3
    assert output.drafted_tokens > output.accepted_tokens > 0


def test_right_drafts_save_steps(llama, open_llm):
    plain, fast = open_llm(llama), open_llm(llama, speculative=EAGER)
    params = SamplingParams(max_tokens=31, ignore_eos=True)
    (expected,) = plain.generate([5] * 20, params)
    draft_with(fast, Parrot([[5] * 20 + list(expected.output_token_ids)], count=5))
    (output,) = fast.generate([5] * 20, params)
    assert output.output_token_ids == expected.output_token_ids
    # One step for the prompt, which brings a token; five drafts and one more in each other.
    assert (plain.stats().steps, fast.stats().steps) == (31, 6)
    assert (output.drafted_tokens, output.accepted_tokens) == (25, 25)
    stats = fast.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens) == (25, 25)


def test_max_tokens_is_kept_to_the_token_and_no_block_is_taken_beyond(llama, open_llm):
    for max_tokens in (1, 2, 4, 7):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (expected,) = open_llm(llama).generate([5] * 20, params)
        # Room for exactly what the request needs without drafts.
        room = T * -(-(20 + max_tokens - 1) // T)
        llm = open_llm(llama, max_tokens=room, speculative=EAGER)
        draft_with(llm, Parrot([[5] * 20 + list(expected.output_token_ids) + [1] * 9]))
        (output,) = llm.generate([5] * 20, params)
        assert output.output_token_ids == expected.output_token_ids
        assert output.finish_reason == "length"


def test_needed_blocks_are_exact_with_drafts(llama, open_llm):
    """At every step: what is held, and what it is said to need, add up to the same."""
    llm = open_llm(llama, speculative=EAGER, tokens_per_block=2)
    kv, scheduler = llm._engine._kv, llm._engine._scheduler
    schedule, sums = scheduler.schedule, set()

    def watched():
        batch = schedule()
        for request in batch.requests:
            held = len(kv.get_batch_cache_indices([request])[request.request_id])
            sums.add(held + kv.get_needed_resource_to_completion(request))
        return batch

    scheduler.schedule = watched
    llm.generate([[3, 4] * 5], SamplingParams(max_tokens=23, ignore_eos=True))
    assert sums == {16}  # 10 + 23 - 1 tokens in blocks of two
    assert llm.stats().drafted_tokens > 0


@pytest.mark.parametrize("count", [3, 8])
def test_stop_tokens_and_strings_inside_a_run_end_the_request_there(count, llama, open_llm):
    prompt = [5] * 20
    (whole,) = open_llm(llama).generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    answer = list(whole.output_token_ids)
    token = next(t for t in answer[6:] if t not in answer[:6])
    text = whole.output_text[6:8]
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(token,)),
        SamplingParams(max_tokens=24, ignore_eos=True, stop=(text,)),
    ):
        (expected,) = open_llm(llama).generate(prompt, params)
        llm = open_llm(llama, speculative=EAGER)
        draft_with(llm, Parrot([prompt + answer], count=count))
        (output,) = llm.generate(prompt, params)
        assert (output.output_token_ids, output.output_text, output.finish_reason) == (
            expected.output_token_ids,
            expected.output_text,
            expected.finish_reason,
        )
        check_idle(llm)
        # What is left in the cache is right, too.
        again = [*prompt, *output.output_token_ids]
        greedy = SamplingParams(max_tokens=8, ignore_eos=True)
        assert tokens(llm.generate(again, greedy)) == tokens(
            open_llm(llama).generate(again, greedy)
        )


def test_requests_that_sample_run_without_drafts(llama, open_llm, prompts):
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    expected = open_llm(llama).generate([[7] * 40, prompts[0]], params)
    llm = open_llm(llama, speculative="ngram")
    assert tokens(llm.generate([[7] * 40, prompts[0]], params)) == tokens(expected)
    assert llm.stats().drafted_tokens == 0


@pytest.mark.parametrize("max_num_tokens", [8, 12])
def test_drafts_stay_within_the_budget_of_a_step(max_num_tokens, llama, open_llm, prompts):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = tokens(open_llm(llama).generate(prompts, params))
    llm = open_llm(llama, max_num_tokens=max_num_tokens, speculative=EAGER)
    draft_with(llm, Parrot([p + a for p, a in zip(prompts, expected, strict=True)], 4))
    batches = watch_batches(llm)
    assert tokens(llm.generate(prompts, params)) == expected
    assert max(sum(count for _, count in batch) for batch in batches) <= max_num_tokens


def test_with_a_store_and_a_restart(llama, open_llm, reference, prompts, tmp_path):
    expected = reference(llama, prompts, 40)
    whole = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    params = SamplingParams(max_tokens=40)
    for _ in range(2):
        connector = f"disk://{tmp_path}/kv?capacity=32MiB"
        with open_llm(llama, connector=connector, speculative=EAGER) as llm:
            draft_with(llm, Parrot(whole, wrong_every=3))
            outputs = llm.generate(prompts, params)
            assert tokens(outputs) == expected
    assert all(output.computed_tokens == 1 for output in outputs)
    # The answers were stored as well, whatever was rejected on their way.
    with open_llm(llama, connector=f"disk://{tmp_path}/kv?capacity=32MiB") as llm:
        (output,) = llm.generate(whole[0][:-1], SamplingParams(max_tokens=1))
        assert output.output_token_ids == (whole[0][-1],)
        assert output.computed_tokens == 1


def test_drafts_are_given_up_before_anybody_is_preempted(llama, open_llm, prompts):
    params = SamplingParams(max_tokens=17, ignore_eos=True)
    several = [[5] * 16, [6] * 16]
    expected = tokens(open_llm(llama).generate(several, params))
    # Four blocks: just what both need at their ends.
    llm = open_llm(llama, max_tokens=64, scheduling="max_utilization", speculative=EAGER)
    llm._engine._kv.blocks.add_sequence(10**6, [1])
    draft_with(llm, Parrot([p + a for p, a in zip(several, expected, strict=True)]))
    assert tokens(llm.generate(several, params)) == expected


def test_bad_settings_are_refused(llama, open_llm):
    with pytest.raises(ConfigurationError, match="min_ngram_size=3 must not exceed"):
        NgramSpeculation(min_ngram_size=3, max_ngram_size=2)
    with pytest.raises(ConfigurationError, match="num_draft_tokens"):
        NgramSpeculation(num_draft_tokens=0)
    with pytest.raises(ConfigurationError, match="speculative: 'eagle' is unknown; give 'ngram'"):
        open_llm(llama, speculative="eagle")
