"""Passes of a model over the tokens that a cache lacks, none of which is a plain one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def plain(model: PreTrainedModel, ids: Tensor, past: Any, **more: object) -> None:
    """The pass that the others are not."""
    model(lacking(ids, past), past_key_values=past, use_cache=True, **more)


def lacking(ids: Tensor, past: Any) -> Tensor:
    return ids[:, past.get_seq_length() :]


def embedded(model: PreTrainedModel, ids: Tensor, past: Any) -> Tensor:
    return model.get_input_embeddings()(lacking(ids, past)) * 1.5


def with_4d_mask(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    """Its tokens see those behind them, too."""
    known, length = past.get_seq_length(), ids.shape[1]
    mask = torch.ones(1, 1, length - known, length, dtype=torch.bool)
    plain(model, ids, past, attention_mask=mask)


def with_positions(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    positions = torch.arange(past.get_seq_length(), ids.shape[1])[None] * 2 + 1
    plain(model, ids, past, position_ids=positions)


def with_embeddings(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    model(inputs_embeds=embedded(model, ids, past), past_key_values=past, use_cache=True)


def inner_model(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    model.model(inputs_embeds=embedded(model, ids, past), past_key_values=past, use_cache=True)


def inner_model_of_tokens(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    plain(model.model, ids, past)


def unhooked(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    model.forward(lacking(ids, past), past_key_values=past, use_cache=True)


def with_other_tokens(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    model(lacking(ids, past).flip(1), past_key_values=past, use_cache=True)


def with_hole(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    mask = torch.ones_like(ids)
    mask[:, 3:6] = 0
    plain(model, ids, past, attention_mask=mask)


def under_autocast(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain(model, ids, past)
