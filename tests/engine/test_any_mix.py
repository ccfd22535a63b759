"""Whatever is asked together, in caches nearly too small, is answered as it is alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.engine.sampling.drafts import NgramSpeculation

CROWDED = {
    "queueing": ("llama", {"max_tokens": 160}, {}),
    "preempting": (
        "llama",
        {"max_tokens": 128},
        {"scheduling": "max_utilization", "speculative": "ngram"},
    ),
    "windows": (
        "mixed",
        {"max_tokens": 160, "host_cache_size": 1 << 20},
        {
            "scheduling": "max_utilization",
            "speculative": NgramSpeculation(num_draft_tokens=5, min_ngram_size=1),
        },
    ),
}
"""By name: the model, its cache, and how the engine serves it."""


def questions():
    """Eight prompts over two prefixes; one answer is sampled."""
    rng = np.random.default_rng(2)
    stems = [rng.integers(0, 256, length).tolist() for length in (45, 37)]
    for number in range(8):
        yield (
            stems[number % 2] + rng.integers(0, 256, 3 * number + 1).tolist(),
            SamplingParams(
                max_tokens=4 + 5 * number,
                ignore_eos=True,
                temperature=float(number == 3),
                seed=number,
            ),
        )


@pytest.fixture(scope="module", params=CROWDED)
def crowded(request, model_of, mixed):
    """An engine with few blocks that computes prompts in chunks; the questions, the answers."""
    arch, cache, how = CROWDED[request.param]
    model = mixed if arch == "mixed" else model_of(arch)
    asked = list(questions())
    roomy = KvCacheConfig(tokens_per_block=8, max_tokens=2048, enable_block_reuse=False)
    with LLM(model, kv_cache=roomy, dtype="float64") as llm:
        answers = [llm.generate(*question)[0].output_token_ids for question in asked]
    small = KvCacheConfig(tokens_per_block=8, **cache)
    with LLM(model, kv_cache=small, dtype="float64", max_num_tokens=24, **how) as llm:
        yield llm, asked, answers


@settings(max_examples=5)
@given(data=st.data())
def test_any_mix_gets_the_answers_it_gets_alone(crowded, data):
    llm, asked, answers = crowded
    handles = []
    for number in data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=20)):
        handles.append((number, llm.submit(*asked[number])))
        if data.draw(st.integers(0, 5)) == 0:
            handles[-1][1].abort()
    for number, handle in handles:
        if data.draw(st.integers(0, 7)) == 0:
            handle.abort()
        output = handle.result(timeout=60)
        expected = answers[number]
        if output.finish_reason == "abort":
            expected = expected[: len(output.output_token_ids)]
        assert output.output_token_ids == expected
    llm.generate([1], SamplingParams(max_tokens=1))
    stats = llm.stats()
    assert (stats.waiting_requests, stats.running_requests) == (0, 0)
    assert stats.free_blocks == stats.max_blocks
    llm._engine._kv.blocks.check_invariants()
