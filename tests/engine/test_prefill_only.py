"""``max_tokens=0``: the prompt is computed and in the cache, nothing is generated."""

from __future__ import annotations

import pytest
from observed import tokens

from kvconnect import SamplingParams

PREFILL = SamplingParams(max_tokens=0)
GREEDY = SamplingParams(max_tokens=20)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_next_request_computes_one_token(arch, model_of, open_llm, reference, prompts):
    llm = open_llm(model_of(arch), max_num_tokens=16)
    outputs = llm.generate(prompts, PREFILL)
    assert {(one.finish_reason, one.output_token_ids) for one in outputs} == {("length", ())}
    answers = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert tokens(answers) == reference(model_of(arch), prompts, 20)
    assert {one.computed_tokens for one in answers} == {1}
    stats = llm.stats()
    assert stats.generated_tokens == sum(len(one.output_token_ids) for one in answers)
    assert stats.free_blocks == stats.max_blocks


def test_a_stream_of_nothing_ends(llama, open_llm):
    (chunk,) = [one for one in open_llm(llama).stream([1, 2, 3], PREFILL) if one.finish_reason]
    assert (chunk.token_ids, chunk.finish_reason) == ((), "length")
