"""Families whose attention has softcaps or sinks answer as transformers does, in float64."""

from __future__ import annotations

import pytest
from observed import preempt, tokens

from kvconnect import SamplingParams

GREEDY = SamplingParams(max_tokens=20)
# A softcap in full attention and windows; a sink in each layer; sinks in layers with windows alone.
FAMILIES = ["gemma2", "gpt_oss", "mimo_v2_flash"]
LESS_OFTEN = ["vaultgemma", "granite_swa", "granitemoe_swa", "flint"]
ALL = [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in LESS_OFTEN)]


@pytest.mark.parametrize("family", ALL)
def test_in_chunks_reused_preempted_then_restored(
    family, tiny, open_llm, reference, prompts, tmp_path
):
    store, model = f"disk://{tmp_path}/kv?capacity=32MiB", tiny(family)
    expected = reference(model, prompts, 20)
    with open_llm(model, connector=store, max_num_tokens=24) as llm:
        assert {one.window for one in llm.layouts} == {None, 24}
        assert tokens(llm.generate(prompts, GREEDY)) == expected
        sent = preempt(llm, lambda request: request.num_generated_tokens in {3, 11})
        assert tokens(llm.generate(prompts, GREEDY)) == expected
        assert len(sent) >= len(prompts)
    outputs = open_llm(model, connector=store).generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    assert sum(one.reused_store_tokens for one in outputs) > 200


@pytest.mark.parametrize("family", ALL)
def test_whole_prompts_in_blocks_of_another_size(family, tiny, open_llm, reference, prompts):
    llm = open_llm(tiny(family), tokens_per_block=2)
    assert tokens(llm.generate(prompts, GREEDY)) == reference(tiny(family), prompts, 20)


def test_a_switch_of_sinks_in_the_configuration_is_no_reason_to_refuse(tiny, open_llm):
    """MiMo's checkpoints say which layers have them."""
    switches = {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
    (output,) = open_llm(tiny("mimo_v2_flash", **switches)).generate([5, 6, 7], GREEDY)
    assert output.output_token_ids
