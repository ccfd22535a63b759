"""The passes over a prompt that end where snapshots of recurrent states are due."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvconnect.integrations.transformers.states import positions_of
from kvconnect.integrations.transformers.stored_cache import StoredCache


def compute_until(
    model: PreTrainedModel,
    cache: StoredCache,
    inputs: Mapping[str, object] | Tensor,
    ends: Sequence[int],
) -> None:
    """Computes a batch of prompts behind what `cache` holds, a pass up to each of `ends`.

    The device computes on when this returns. Passes are the model's own, with its hooks.

    Args:
        model: computes.
        cache: is filled.
        inputs: as `PromptCache.prefill` takes them, without padding.
        ends: tokens, ascending; none: nothing is computed.
    """
    if not ends:
        return
    ids: Any = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
    ids = ids.to(model.device)
    names = inspect.signature(model.forward).parameters
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    with torch.no_grad():
        for end in ends:
            part = ids[:, cache.get_seq_length() : end]
            positions = positions_of(model, cache, part)
            model(input_ids=part, past_key_values=cache, use_cache=True, **positions, **more)
    cache.prefilled()
