"""Families that compute attention in ways of their own answer as transformers does, in float64.

In chunks, from a reused prefix, with drafts, preempted, and restored from a store.
"""

from __future__ import annotations

import pytest
from observed import check_rest, preempt, slow, tokens
from parrot import EAGER, Parrot, draft_with

from kvconnect import KvCacheConnectorConfig, SamplingParams

GREEDY = SamplingParams(max_tokens=12)
# A softcap in full attention and windows; a sink in each layer; sinks in layers with windows alone.
SCORES = ["gemma2", "gpt_oss", "mimo_v2_flash"]
FAMILIES = [
    *SCORES,
    "deepseek_v2",  # latents
    *("falcon", "llama4_text"),  # scores by the model's own code; chunks of attention, as masks
    # An index over latents; with sinks, and layers that share an index; over keys of several
    # tokens, beside recurrent layers.
    *("deepseek_v32", "hy_v4", "qwen4_exp_text"),
]
OTHER_SCORES = ["vaultgemma", "granite_swa", "granitemoe_swa", "flint"]
LESS_OFTEN = [
    *OTHER_SCORES,
    *("axk1", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"),
    *("bloom", "codegen", "diffllama", "doge", "gpt_neo", "gptj", "hrm_text", "mbart"),
    *("axk2", "dots3_note_text", "glm_moe_dsa"),
]
INDEXED = {"deepseek_v32", "hy_v4", "axk2", "dots3_note_text", "glm_moe_dsa"}


@pytest.fixture
def model(family, tiny):
    """Writes a model of a family; one with an index attends to 8 tokens of each sequence."""
    if family == "qwen4_exp_text":
        return tiny(family, indexer_budget=8)
    return tiny(family, **{"index_topk": 8} if family in INDEXED else {})


@pytest.mark.parametrize("family", [*FAMILIES, *slow(*LESS_OFTEN)])
def test_reused_drafted_preempted_then_restored(model, open_llm, reference, several, tmp_path):
    store = f"disk://{tmp_path}/kv?capacity=32MiB"
    expected = reference(model, several, 12)
    with open_llm(model, connector=store, max_num_tokens=25, speculative=EAGER) as llm:
        draft_with(llm, Parrot([p + a for p, a in zip(several, expected, strict=True)], 3))
        for _ in range(2):
            outputs = llm.generate(several, GREEDY)
            assert tokens(outputs) == expected
        if not any(one.states for one in llm.layouts):
            assert {one.computed_tokens for one in outputs} == {1}
        assert llm.stats().accepted_tokens > 0
        sent = preempt(llm, lambda request: request.num_generated_tokens in {3, 8})
        assert tokens(llm.generate(several, GREEDY)) == expected
        assert sent
        check_rest(llm)
    # Its loaded tokens are counted: none is computed meanwhile, no lookup is late.
    alone = KvCacheConnectorConfig(url=store, overlap_loads=False, lookup_timeout_ms=60_000)
    outputs = open_llm(model, connector=alone, max_num_tokens=40).generate(several, GREEDY)
    assert tokens(outputs) == expected
    assert sum(one.reused_store_tokens for one in outputs) > 140


@pytest.mark.parametrize("family", [*SCORES, *slow(*OTHER_SCORES)])
def test_whole_prompts_in_blocks_of_another_size(model, open_llm, reference, several):
    llm = open_llm(model, tokens_per_block=2)
    assert {one.window for one in llm.layouts} == {None, 24}
    assert tokens(llm.generate(several, GREEDY)) == reference(model, several, 12)


def test_a_switch_of_sinks_in_the_configuration_is_no_reason_to_refuse(tiny, open_llm):
    """MiMo's checkpoints say which layers have them."""
    switches = {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
    (output,) = open_llm(tiny("mimo_v2_flash", **switches)).generate([5, 6, 7], GREEDY)
    assert output.output_token_ids
