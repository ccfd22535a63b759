"""In float32, bfloat16 and a cache in fp8 sums differ: logits agree within a tolerance."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvconnect import KvCacheConfig, SamplingParams

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "fp8": 2**-4}
"""Relative to the largest logit: bfloat16 has 8 bits, e4m3 keeps three behind the first."""


@pytest.fixture(scope="module")
def calm_model(tmp_path_factory):
    """A Llama with weights of ordinary size: chaos is not what is measured here."""
    from kvconnect.engine.checkpoint.random_model import make_model

    return make_model(tmp_path_factory.mktemp("calm"), "llama", initializer_range=0.1)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_logits_and_tokens_within_tolerance(precision, calm_model, open_llm, prompts):
    """With fp8 only the cache is rounded."""
    cached, dtype = ("fp8", "float64") if precision == "fp8" else ("auto", precision)
    config = KvCacheConfig(tokens_per_block=16, max_tokens=1024, dtype=cached)
    llm = open_llm(calm_model, kv_cache=config, dtype=dtype, max_num_tokens=24)
    seen: list[torch.Tensor] = []
    forward = llm._engine._model.forward
    llm._engine._model.forward = lambda step: seen.append(forward(step)) or seen[-1]
    prompt = prompts[4]
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))

    model = AutoModelForCausalLM.from_pretrained(calm_model, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        whole = torch.tensor([[*prompt, *output.output_token_ids]])
        expected = model(whole).logits[0, len(prompt) - 1 : -1].double()
    got = torch.cat(seen[-24:]).double()
    tolerance = TOLERANCES[precision] * expected.abs().max()
    assert 0 < (got - expected).abs().max() < tolerance

    # Tokens agree up to the first place where the reference's two best are closer than that.
    best = expected.topk(2).values
    clear = int((best[:, 0] - best[:, 1] > 2 * tolerance).long().cumprod(0).sum())
    assert list(output.output_token_ids[:clear]) == expected.argmax(-1).tolist()[:clear]
    assert dtype != "float32" or clear > 4
