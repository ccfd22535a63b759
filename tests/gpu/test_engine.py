"""The engine on a device answers as ``generate()`` does there, whatever tier blocks come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvconnect import LLM, KvCacheConfig, SamplingParams

GREEDY = SamplingParams(max_tokens=20)
PROMPTS = [np.random.default_rng(n).integers(1, 250, n).tolist() for n in (70, 33, 5, 100, 1)]


def tokens(outputs):
    return [list(output.output_token_ids) for output in outputs]


def expected(directory, device):
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    ).to(device)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device)
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
        out = model.generate(ids, **given)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt2", "mixtral"])
def test_cold_and_reused_in_float64(arch, device, model_of):
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=2048)
    with LLM(model_of(arch), device=device, dtype="float64", kv_cache=cache) as llm:
        right = expected(model_of(arch), device)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == right
        again = llm.generate(PROMPTS, GREEDY)
        assert tokens(again) == right
        assert {output.computed_tokens for output in again} == {1}


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_through_the_host_tier(arch, device, model_of):
    small = {"tokens_per_block": 16, "max_tokens": 256, "host_cache_size": 64 << 20}
    with LLM(model_of(arch), device=device, dtype="float64", kv_cache=small) as llm:
        right = expected(model_of(arch), device)
        for _ in range(2):  # the prompts do not fit the device together
            assert [tokens(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS] == right


def test_restored_from_disk(device, model_of, tmp_path):
    given = {"device": device, "dtype": "float64", "connector": f"disk:{tmp_path}/kv"}
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=2048)
    answers = []
    for _ in range(2):
        with LLM(model_of("llama"), kv_cache=cache, **given) as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            answers.append(tokens(outputs))
    assert answers[0] == answers[1]
    assert sum(output.reused_store_tokens for output in outputs) > 150


def test_a_cache_in_fp8_answers_the_same_cold_and_reused(device, model_of):
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=2048, dtype="fp8")
    with LLM(model_of("llama"), device=device, kv_cache=cache) as llm:
        cold = tokens(llm.generate(PROMPTS, GREEDY))
        assert tokens(llm.generate(PROMPTS, GREEDY)) == cold


@pytest.mark.parametrize("speculative", [None, "ngram"])
def test_half_precision_answers_the_same_cold_and_reused(device, model_of, speculative):
    given = {"dtype": "bfloat16", "speculative": speculative}
    with LLM(model_of("llama"), device=device, **given) as llm:
        cold = llm.generate(PROMPTS[:1], GREEDY)
        again = llm.generate(PROMPTS[:1], GREEDY)
        assert len(tokens(again)[0]) == len(tokens(cold)[0])
