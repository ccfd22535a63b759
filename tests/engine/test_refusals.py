"""What the attention seam cannot serve is refused with a sentence, before anything is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvconnect import LLM, KvCacheConfig
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.engine.model.seam import AttentionProbe
from kvconnect.errors import UnsupportedModel, UsageError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("cpmant", {}, "CpmAntForCausalLM is not served: tokens of a prompt attend to later ones"),
        ("mpt", {"d_model": 32, "n_heads": 2}, "MptForCausalLM is not served: its biases are made"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional|mask of its own"),
        ("t5", {}, "model_type: 't5' is no causal LM"),
    ],
)
def test_refused_with_the_reason(model_type, settings, message, tmp_path):
    config = AutoConfig.for_model(model_type, **SIZES | settings)
    if model_type == "t5":
        config.save_pretrained(tmp_path)
    else:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        LLM(tmp_path)


def module(**attributes):
    made = torch.nn.Identity()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "bidirectional"),
        ({"something_new": 3}, "something_new"),
    ],
)
def test_whatever_changes_the_scores_is_refused(extra, message):
    with pytest.raises(UnsupportedModel, match=message):
        AttentionProbe().check(module(), None, extra)


def test_a_mask_of_the_models_own_is_refused():
    with pytest.raises(UnsupportedModel, match="mask of its own"):
        AttentionProbe().check(module(), torch.zeros(1, 1, 1, 1), {})


def test_what_changes_nothing_is_accepted():
    extra = {"dropout": 0.0, "position_ids": torch.zeros(1), "indices": None, "flag": False}
    AttentionProbe().check(module(is_causal=True), None, extra)


STATES = AttentionInput(*[torch.zeros(1, 2, 1, 4)] * 3, None, None)


def test_layers_out_of_order_are_refused():
    probe = AttentionProbe()
    with pytest.raises(UnsupportedModel, match=r"layer 1 ran when layer 0 .* have no attention"):
        probe.attend(1, STATES)
    probe.attend(0, STATES)
    with pytest.raises(UnsupportedModel, match=r"layer 0 ran when layer 1 .* attends again"):
        probe.attend(0, STATES)


def test_sinks_of_other_shapes_than_the_heads_are_refused():
    with pytest.raises(UnsupportedModel, match=r"sinks \(4,\) .* each of the 2 heads"):
        AttentionProbe().attend(0, replace(STATES, sinks=torch.zeros(4)))


def test_a_forward_pass_that_left_the_cache_out_is_noticed(model_of):
    """Another attention implementation ignores ``kv=`` without a word; layers of Qwen3 ask it."""
    with LLM(model_of("qwen3"), kv_cache=KvCacheConfig(max_tokens=256)) as llm:
        llm._engine._model._model.set_attn_implementation("sdpa")
        with pytest.raises(UsageError, match="0 of 3 attention layers used the KV cache"):
            llm.generate([1, 2, 3])
