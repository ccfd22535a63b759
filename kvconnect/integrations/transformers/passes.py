"""The distinction between plain causal passes, whose tokens name their results, and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvconnect.digest.doubts import Doubt

# These change no key and no value, or are checked by themselves.
_HARMLESS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache_position", "past_key_values"}
    | {"inputs_embeds", "use_cache", "return_dict", "logits_to_keep", "labels"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)


class ComputedPass(NamedTuple):
    """A finished pass that was not read back from the device yet.

    Attributes:
        start, end: of its tokens, padding included.
        beyond: ids of those that rows do not know, ``[batch, tokens]``.
        plain: booleans on the device; the pass is plain if all hold.
    """

    start: int
    end: int
    beyond: Tensor
    plain: tuple[Tensor, ...]


def placement(
    given: Mapping[str, Any], start: int, offsets: Sequence[int]
) -> Doubt | tuple[Tensor, ...]:
    """Returns why `given` is no plain causal pass after `start` tokens, or on which conditions.

    A plain pass has ids. Its mask is 2-D and hides only the padding on the left. Its positions
    count from the first token of each row. If rows are padded, mask and positions must be given.

    Args:
        given: the arguments of the model's ``forward``, by name.
        start: tokens in the cache when it begins, padding included.
        offsets: padding of each row.

    Returns:
        The reason; or tensors of one boolean on the device, all of which hold for a plain pass.
        They are not read yet, as that would wait for the device.
    """
    ids: Tensor | None = given.get("input_ids")
    if ids is None or given.get("inputs_embeds") is not None:
        return Doubt.EMBEDDINGS
    if any(name not in _HARMLESS and _shapes(value) for name, value in given.items()):
        return Doubt.OTHER_INPUTS
    tokens = range(start, start + ids.shape[1])
    padding = torch.tensor(offsets, device=ids.device)[:, None] if any(offsets) else None
    conditions: list[Tensor] = []
    for found in (
        _mask(given.get("attention_mask"), tokens.stop, padding),
        _positions(given.get("position_ids"), tokens, padding),
        _positions(given.get("cache_position"), tokens, None),
    ):
        if isinstance(found, Doubt):
            return found
        conditions += [] if found is None else [found]
    return tuple(conditions)


def _shapes(value: object) -> bool:
    """Returns whether an argument of another name may shape keys and values; zeros do not."""
    return bool(value.any()) if isinstance(value, Tensor) else value not in (None, False, 0)


def _mask(mask: object, end: int, padding: Tensor | None) -> Doubt | Tensor | None:
    if mask is None:
        return None if padding is None else Doubt.MASK
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < end:
        return Doubt.MASK
    kept = mask[:, :end] != 0
    if padding is None:
        return kept.all()
    wanted = torch.arange(end, device=mask.device) >= padding.to(mask.device)
    return (kept == wanted).all()


def _positions(positions: object, tokens: range, padding: Tensor | None) -> Doubt | Tensor | None:
    """Checks positions as `_mask` checks the mask. Several planes of positions must be alike."""
    if positions is None:
        return None if padding is None else Doubt.POSITION_IDS
    if not isinstance(positions, Tensor) or positions.shape[-1] != len(tokens):
        return Doubt.POSITION_IDS
    wanted = torch.arange(tokens.start, tokens.stop, device=positions.device)
    if padding is None:
        return (positions == wanted).all()
    wanted = wanted - padding.to(positions.device)
    return ((positions == wanted) | (wanted < 0)).all()
