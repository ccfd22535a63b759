"""The prompts of a batch as rows of token ids, each with the padding before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.transformers.structure import Change
from kvconnect.text import shown
from kvconnect.tokens import TokenArray

_TEXT = {"input_ids", "attention_mask"}


@dataclass(frozen=True, slots=True, eq=False)
class PromptRow:
    """A prompt without its padding.

    Attributes:
        tokens: its token ids, without padding; at least one.
        offset: tokens of padding before it.
    """

    tokens: TokenArray
    offset: int


def prompt_rows(
    inputs: Mapping[str, object] | Tensor, pad_token_ids: frozenset[int]
) -> tuple[list[PromptRow], Change | None]:
    """Returns the prompts in a tokenizer's output, and why they cannot be cached, if so.

    Args:
        inputs: ``input_ids`` ``[batch, tokens]``, with an ``attention_mask`` of that shape if there
            is padding; or just the ids.
        pad_token_ids: ids that transformers takes for padding if there is no mask.

    Returns:
        The prompts, and why they cannot be cached; ``None``: they can.

    Raises:
        ConfigurationError: there are no ``input_ids`` ``[batch, tokens]``; or there is padding
            inside or after a prompt, which ``generate()`` cannot do right.
    """
    if not isinstance(inputs, (Mapping, Tensor)):
        raise ConfigurationError(
            f"inputs: {shown(inputs)} must be what a tokenizer returns with return_tensors='pt', "
            "or its input_ids"
        )
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise ConfigurationError(
            f"inputs: input_ids={shown(ids)} must be a tensor of token ids, [batch, tokens], as of "
            "tokenizer(text, return_tensors='pt')"
        )
    tokens = ids.detach().to("cpu", torch.int32).numpy()
    mask = given.get("attention_mask")
    if mask is None:
        padded = pad_token_ids & set(np.unique(tokens).tolist())
        doubt = Change(Doubt.MASK, "the prompt has padding and no attention_mask")
        rows = [PromptRow(row, 0) for row in tokens]
        return rows, _other_inputs(given) or (doubt if padded else None)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise ConfigurationError(
            f"inputs: attention_mask={shown(mask)} must be a tensor of the shape of input_ids, "
            f"{tuple(ids.shape)}"
        )
    kept = mask.detach().to("cpu").numpy() != 0
    rows = []
    for number, (row, real) in enumerate(zip(tokens, kept, strict=True)):
        offset = int(real.argmax())
        if not real[offset:].all():
            raise ConfigurationError(
                f"inputs: row {number} of attention_mask has padding inside or after the prompt, "
                "or nothing else; pad on the left (tokenizer.padding_side = 'left')"
            )
        rows.append(PromptRow(row[offset:], offset))
    return rows, _other_inputs(given)


def _other_inputs(given: Mapping[str, object]) -> Change | None:
    """Returns the other inputs of the model that may change keys and values."""
    others = sorted(
        name
        for name, value in given.items()
        if name not in _TEXT and value is not None and not _is_zero(value)
    )
    return Change(Doubt.OTHER_INPUTS, ", ".join(others)) if others else None


def _is_zero(value: object) -> bool:
    """Returns whether `value` is all zeros, as a tokenizer's ``token_type_ids`` of one text."""
    return isinstance(value, Tensor) and not bool(value.any())
