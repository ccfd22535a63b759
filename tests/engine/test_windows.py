"""Layers that look back only so far: which share a pool, and windows that are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvconnect import KvCacheConfig, SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.engine.model.pool_groups import effective_windows, group_layouts
from kvconnect.engine.model.seam import LayerShape

GREEDY = SamplingParams(max_tokens=28)


def one_pool(config, layouts, device):
    """Makes a manager that takes no pools of windows, which are masks then."""
    return KVCacheManager(config, layouts, device)


def windowed_reference(directory, prompt, max_tokens, windows):
    """Greedy decoding over the whole sequence again and again, with a mask of our own per layer."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )
    for layer, window in zip(model.model.layers, windows, strict=True):

        def masked(module, args, kwargs, window=window):
            length = kwargs["hidden_states"].shape[1]
            places = torch.arange(length)
            hidden = places > places[:, None]
            if window is not None:
                hidden |= places <= places[:, None] - window
            mask = torch.zeros(length, length, dtype=torch.float64)
            kwargs["attention_mask"] = mask.masked_fill(hidden, -torch.inf)[None, None]
            return args, kwargs

        layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    sequence = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0, -1]
            sequence.append(int(logits.float().argmax()))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("pools", [True, False])
def test_max_attention_window_is_repeated_over_the_layers(pools, open_llm, llama):
    prompt = np.random.default_rng(1).integers(0, 256, 60).tolist()
    config = KvCacheConfig(tokens_per_block=4, max_tokens=1024, max_attention_window=(20, 4096, 9))
    more = {} if pools else {"kv_cache_manager": one_pool}
    llm = open_llm(llama, kv_cache=config, max_num_tokens=16, **more)
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    expected = windowed_reference(llama, prompt, 12, (20, None, 9))
    assert list(output.output_token_ids) == expected
    plain = open_llm(llama).generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    assert list(plain[0].output_token_ids) != expected
    assert [one.window for one in llm.layouts] == ([None, 20, 9] if pools else [None])


def test_other_windows_are_another_model_to_a_store(open_llm, llama, tmp_path):
    store = f"disk://{tmp_path}/kv?capacity=32MiB"
    prompt = np.random.default_rng(1).integers(0, 256, 60).tolist()

    def ask(windows):  # the layout of one pool says nothing of them
        config = KvCacheConfig(tokens_per_block=16, max_tokens=1024, max_attention_window=windows)
        more = {"connector": store, "kv_cache": config, "kv_cache_manager": one_pool}
        with open_llm(llama, **more) as llm:
            return llm.generate(prompt, GREEDY)[0].reused_store_tokens

    assert [ask(None), ask((20,)), ask((20,)), ask((4096,))] == [0, 0, 59, 59]


# ---------------------------------------------------------------- which layers share a pool


def shape(window=None, heads=2, dim=16):
    return LayerShape(heads, dim, dim, window)


def test_the_shorter_window_counts():
    layers = [shape(), shape(64), shape(64), shape()]
    assert effective_windows(layers, None, None) == (None, 64, 64, None)
    assert effective_windows(layers, [32], None) == (32, 32, 32, 32)
    assert effective_windows(layers, [4096, 100], None) == (4096, 64, 64, 100)


def test_a_window_that_holds_the_longest_sequence_is_none():
    assert effective_windows([shape(), shape(64)], [512, 512], 512) == (None, 64)
    assert effective_windows([shape(), shape(64)], [512, 512], 64) == (None, None)


def test_groups_are_full_attention_first_then_by_window_descending():
    layers = [shape(8), shape(64), shape(), shape(heads=1), shape(8), shape()]
    windows = effective_windows(layers, None, None)
    layouts = group_layouts(layers, windows, tokens_per_block=4, dtype=torch.float32)
    assert [(one.window, one.num_kv_heads, one.layers) for one in layouts] == [
        (None, 2, (2, 5)),
        (None, 1, (3,)),
        (64, 2, (1,)),
        (8, 2, (0, 4)),
    ]
