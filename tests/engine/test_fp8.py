"""A cache in fp8: half the memory of bfloat16, rounded, and the same however it was filled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from observed import slow, tokens

from kvconnect import KvCacheConfig, SamplingParams
from kvconnect.engine.model.pages import LayerPages, PageNumbers, SlotNumbers
from kvconnect.layout import KvCacheLayout

FP8 = KvCacheConfig(tokens_per_block=16, max_tokens=1024, dtype="fp8")
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("arch", ["llama", *slow("gemma3"), "deepseek_v3"])
def test_reused_it_gives_the_tokens_it_gave_cold(arch, model_of, open_llm, prompts):
    model = model_of(arch)
    cold = FP8.model_copy(update={"enable_block_reuse": False})
    expected = tokens(open_llm(model, kv_cache=cold).generate(prompts, GREEDY))
    assert expected != tokens(open_llm(model).generate(prompts, GREEDY))
    llm = open_llm(model, kv_cache=FP8, max_num_tokens=33)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY)
        assert tokens(outputs) == expected
    assert {output.computed_tokens for output in outputs} == {1}
    fast = open_llm(model, kv_cache=FP8, speculative="ngram")
    assert tokens(fast.generate(prompts, GREEDY)) == expected


def test_after_a_restart_too(llama, open_llm, prompts, tmp_path):
    connector = f"disk://{tmp_path}/kv?capacity=32MiB"
    with open_llm(llama, kv_cache=FP8, connector=connector) as llm:
        expected = tokens(llm.generate(prompts, GREEDY))
        assert llm.layout.block_nbytes * 8 == open_llm(llama).layout.block_nbytes
    llm = open_llm(llama, kv_cache=FP8, connector=connector)
    outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert tokens(outputs) == expected
    assert {output.computed_tokens for output in outputs} == {1}
    # The other dtype finds nothing of it.
    with open_llm(llama, connector=connector) as other:
        assert other.generate(prompts[0], GREEDY)[0].reused_store_tokens == 0


def test_what_is_beyond_its_range_becomes_its_largest_value_and_no_nan():
    layout = KvCacheLayout(1, 1, 4, 4, 2, torch.float8_e4m3fn)
    pages = LayerPages(torch.zeros(3, 2, 2, 1, 4, dtype=layout.dtype), layout, 3, torch.float32)
    states = torch.tensor([[[1e6, -1e6, 0.3, -0.0]]])
    pages.write(SlotNumbers(np.array([2]), torch.device("cpu")), states, states)
    keys, values = pages.gather(PageNumbers(torch.tensor([1, 0])))
    assert keys.shape == (4, 1, 4)
    assert keys[0, 0].tolist() == [448.0, -448.0, 0.3125, -0.0]
    assert torch.equal(keys, values)
    assert torch.equal(pages.as_stored(states)[0], keys[0])
