"""A pass that shows whether a model still computes the same as when it was named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvconnect.integrations.transformers.states import cached_tensors, empty_cache

_NUM_TOKENS = 16
# Coprime to every vocabulary's size, so that ids lie far apart.
_STEP = 1_000_003


def canary_pass(model: PreTrainedModel) -> list[Tensor]:
    """Computes 16 fixed tokens, with the model's own ``forward`` and all its hooks.

    Returns what each layer keeps (keys, values, states) and the logits after each token. The model
    is neither changed nor put into another mode.
    """
    past = empty_cache(model.config)
    output: Any = model(
        input_ids=canary_ids(model, _NUM_TOKENS), past_key_values=past, use_cache=True
    )
    layers: list[Any] = past.layers
    return [*cached_tensors(layers), results_of(output)]


def results_of(output: Any) -> Tensor:
    """Returns the logits of a model's output; of a model without a head, its last states."""
    logits: Tensor | None = getattr(output, "logits", None)
    states: Tensor = output.last_hidden_state if logits is None else logits
    return states


def canary_ids(model: PreTrainedModel, count: int) -> Tensor:
    """Returns `count` ids, ``[1, count]``, that are the same for each model of a vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    size = int(embeddings.weight.shape[0])
    ids = [(_STEP * (number + 1)) % size for number in range(count)]
    return torch.tensor([ids], device=model.device)
