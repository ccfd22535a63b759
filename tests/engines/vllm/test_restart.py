"""What is computed once is loaded afterwards, token for token."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from vllm_engine import connector, engine, prompts_of

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
