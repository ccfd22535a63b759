"""Generates with a `PromptCache`, says what was loaded, and ends in one of several ways."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
from transformers import AutoModelForCausalLM

from kvconnect.integrations.transformers import PromptCache


def main(model: str, url: str, end: str) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, experts_implementation="eager"
    )
    ids = torch.randint(1, 250, (1, 400), generator=torch.Generator().manual_seed(5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompts = PromptCache(loaded, url, tokens_per_block=16, load_decisions=False)
    past = prompts.prefill(inputs)
    tokens = loaded.generate(
        **inputs, past_key_values=past, max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    said = {"loaded": past.loaded_tokens[0], "tokens": tokens[0].tolist()}
    if end == "kill":
        prompts.flush()
        del past  # its last, partly filled block is on its way
    print(json.dumps(said), flush=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    # Otherwise as programs end that close nothing.


if __name__ == "__main__":
    main(*sys.argv[1:])
