"""`PromptCache` on a device: ``generate()`` answers as without it, cold and restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvconnect.integrations.transformers import PromptCache

PROMPT = np.random.default_rng(5).integers(1, 250, (1, 150)).tolist()


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_cold_and_restored(arch, dtype, device, model_of, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        model_of(arch), dtype=dtype, experts_implementation="eager"
    ).to(device)
    ids = torch.tensor(PROMPT, device=device)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    right = model.generate(ids, **given)
    for attempt in ("cold", "restored"):
        with PromptCache(
            model, f"disk:{tmp_path}/kv", tokens_per_block=16, load_decisions=False
        ) as cache:
            past = cache.prefill({"input_ids": ids})
            out = model.generate(ids, past_key_values=past, **given)
            assert past.not_cached == ""
            if dtype == torch.float64:
                assert torch.equal(out, right)
            assert bool(sum(past.loaded_tokens)) == (attempt == "restored")
