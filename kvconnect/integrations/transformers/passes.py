"""The distinction between plain causal passes, whose tokens name their results, and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvconnect.digest.doubts import Doubt

__all__ = ["Placement", "placement"]

# These change no key and no value, or are checked by themselves.
_HARMLESS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache_position", "past_key_values"}
    | {"inputs_embeds", "use_cache", "return_dict", "logits_to_keep", "labels"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)


class Placement(NamedTuple):
    """The result of a check of a pass.

    Attributes:
        doubt: why the pass is not plain; ``None``: it is if `conditions` hold.
        conditions: tensors of one boolean, on the device; not read yet, as that would wait for it.
    """

    doubt: Doubt | None
    conditions: tuple[Tensor, ...] = ()


def placement(given: Mapping[str, Any], start: int, offsets: Sequence[int]) -> Placement:
    """Returns whether `given` is a plain causal pass after the first `start` tokens.

    A plain pass has ids. Its mask is 2-D and hides only the padding on the left. Its positions
    count from the first token of each row. If rows are padded, mask and positions must be given.

    Args:
        given: the arguments of the model's ``forward``, by name.
        start: tokens in the cache when it begins, padding included.
        offsets: padding of each row.
    """
    ids: Tensor | None = given.get("input_ids")
    if ids is None or given.get("inputs_embeds") is not None:
        return Placement(Doubt.EMBEDDINGS)
    if any(name not in _HARMLESS and _shapes(value) for name, value in given.items()):
        return Placement(Doubt.OTHER_INPUTS)
    end = start + ids.shape[1]
    padding = torch.tensor(offsets, device=ids.device)[:, None] if any(offsets) else None
    mask = _mask(given.get("attention_mask"), end, padding)
    if mask.doubt is not None:
        return mask
    positions = _positions(given.get("position_ids"), range(start, end), padding)
    if positions.doubt is not None:
        return positions
    numbers = given.get("cache_position")
    counted = Placement(None) if numbers is None else _positions(numbers, range(start, end), None)
    return Placement(counted.doubt, (*mask.conditions, *positions.conditions, *counted.conditions))


def _shapes(value: object) -> bool:
    """Returns whether an argument of another name may shape keys and values; zeros do not."""
    return bool(value.any()) if isinstance(value, Tensor) else value not in (None, False, 0)


def _mask(mask: object, end: int, padding: Tensor | None) -> Placement:
    if mask is None:
        return Placement(None if padding is None else Doubt.MASK)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < end:
        return Placement(Doubt.MASK)
    kept = mask[:, :end] != 0
    if padding is None:
        return Placement(None, (kept.all(),))
    wanted = torch.arange(end, device=mask.device) >= padding.to(mask.device)
    return Placement(None, ((kept == wanted).all(),))


def _positions(positions: object, tokens: range, padding: Tensor | None) -> Placement:
    """Checks positions as `_mask` checks the mask. Several planes of positions must be alike."""
    if positions is None:
        return Placement(None if padding is None else Doubt.POSITION_IDS)
    if not isinstance(positions, Tensor) or positions.shape[-1] != len(tokens):
        return Placement(Doubt.POSITION_IDS)
    wanted = torch.arange(tokens.start, tokens.stop, device=positions.device)
    if padding is None:
        return Placement(None, ((positions == wanted).all(),))
    wanted = wanted - padding.to(positions.device)
    return Placement(None, (((positions == wanted) | (wanted < 0)).all(),))
