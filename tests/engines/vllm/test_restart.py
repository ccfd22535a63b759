"""What is computed once is loaded afterwards, token for token."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from vllm_engine import BLOCK, connector, engine, prompts_of

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(500, 320, 33, 31)
WHOLE = [480, 288, 32, 0]  # what of them is cached: whole blocks, never the last token
LOADED = [480, 320, 32, 0]  # by a load in the background: vLLM computes the last token again


def test_cold_device_hit_reset_and_restart_give_the_same_tokens(start, llama, store):
    with engine(llama, None) as plain:
        wanted = plain.tokens(PROMPTS)
    with start(llama, connector(store)) as first:
        cold = first.answer(PROMPTS)
        again = first.answer(PROMPTS)
        first.flush()
        first.forget_device()
        loaded = first.answer(PROMPTS)
    with start(llama, connector(store)) as second:
        restarted = second.answer(PROMPTS)
    for answers in (cold, again, loaded, restarted):
        assert [one.tokens for one in answers] == wanted
    assert [one.cached for one in cold] == [0, 0, 0, 0]
    assert [one.cached for one in again] == WHOLE
    for answers in (loaded, restarted):
        assert [one.cached for one in answers] == LOADED


def test_what_was_generated_is_saved_with_the_prompt(start, llama, store):
    [prompt] = prompts_of(50)
    with start(llama, connector(store)) as first:
        [answer] = first.answer([prompt], 3 * BLOCK)
    with start(llama, connector(store)) as second:
        [longer] = second.answer([prompt + answer.tokens], 4)
        # The last token of the answer was sampled, and never computed.
        assert longer.cached == (50 + 3 * BLOCK - 1) // BLOCK * BLOCK


def test_a_store_in_memory_without_overlapping_steps(llama):
    with engine(llama, connector("memory:?capacity=64MiB"), async_scheduling=False) as one:
        cold = one.answer(PROMPTS)
        one.flush()
        one.forget_device()
        loaded = one.answer(PROMPTS)
    assert [one.tokens for one in loaded] == [one.tokens for one in cold]
    assert [one.cached for one in loaded] == LOADED


def test_a_prompt_of_whole_blocks_leaves_a_token_to_compute(llama, store):
    prompts = prompts_of(4 * BLOCK, BLOCK)
    with engine(llama, connector(store), async_scheduling=False) as one:
        cold = one.answer(prompts)
        one.flush()
        one.forget_device()
        loaded = one.answer(prompts)
    assert [one.tokens for one in loaded] == [one.tokens for one in cold]
    assert [one.cached for one in loaded] == [4 * BLOCK, 0]


def test_salts_are_apart(start, llama, store):
    with start(llama, connector(store)) as one:
        one.answer(PROMPTS[:1], salt="one")
        one.flush()
        one.forget_device()
        [other] = one.answer(PROMPTS[:1], salt="two")
        [none] = one.answer(PROMPTS[:1])
        [same] = one.answer(PROMPTS[:1], salt="one")
        assert (other.cached, none.cached, same.cached) == (0, 0, 480)


def test_models_are_apart(make_vllm_model, store):
    with engine(make_vllm_model(seed=1), connector(store)) as one:
        first = one.tokens(PROMPTS)
    with engine(make_vllm_model(seed=2), connector(store)) as other:
        answers = other.answer(PROMPTS)
    assert [one.cached for one in answers] == [0, 0, 0, 0]
    assert [one.tokens for one in answers] != first
