"""Prompts for `PromptCache`, and what ``generate()`` answers with it and without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvconnect import Backend
from kvconnect.integrations.transformers import PromptCache

T = 16
"""Tokens of a block."""


def opened(model: PreTrainedModel, store: str | Backend, **more: Any) -> PromptCache:
    """A cache that is patient with its store on a busy machine; `more` is of either's settings."""
    own = {"model_revision", "state_interval", "tokens_per_block", "load_decisions"}
    own |= {"canary_interval", "held_bytes"}
    made = {"tokens_per_block": T, "load_decisions": False}
    made |= {name: more.pop(name) for name in own & more.keys()}
    where = "url" if isinstance(store, str) else "backend"
    limits = {"staging_bytes": 8 << 20, "lookup_timeout_ms": 60_000, "load_timeout_s": 60}
    return PromptCache(model, {where: store, **limits, **more}, **made)


def prompt(length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 250, (1, length), generator=generator)


def given(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(
    model: PreTrainedModel, inputs: dict[str, Tensor] | Tensor, **more: Any
) -> list[list[int]]:
    """Prompts and greedy answers."""
    inputs = given(inputs) if isinstance(inputs, Tensor) else inputs
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**inputs, **settings | more).tolist()


def answer(
    model: PreTrainedModel,
    prompts: PromptCache,
    inputs: dict[str, Tensor] | Tensor,
    **more: Any,
) -> tuple[list[list[int]], tuple[int, ...]]:
    """What is generated, and how many tokens of each prompt were loaded for it."""
    past = prompts.prefill(given(inputs) if isinstance(inputs, Tensor) else inputs)
    return generate(model, inputs, past_key_values=past, **more), past.loaded_tokens
