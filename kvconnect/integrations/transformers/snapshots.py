"""The snapshots of one cache that wait to be saved, and the passes behind which they are taken."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvconnect.integrations.transformers.cache_layers import positions_of, snapshot_of
from kvconnect.layout import KvCacheLayout


class Snapshots:
    """Copies of the states of a batch of prompts of one length. Not thread-safe.

    A snapshot is taken behind a pass that ends at one of `ends`, at the prompt's end if a block
    ends there, or at a multiple of the interval. It is kept until it is saved.

    Args:
        layouts: the layouts of states; without any no snapshot is taken.
        interval: tokens, a multiple of the block size.
        start: tokens that are loaded.
        branch: tokens up to which keys and values are stored.
        prompt_end: tokens of the prompt.

    Attributes:
        ends: tokens behind which a pass of the prompt is to end, ascending.
    """

    def __init__(
        self,
        layouts: Sequence[KvCacheLayout],
        interval: int,
        *,
        start: int,
        branch: int,
        prompt_end: int,
    ) -> None:
        self._layouts = layouts
        self._interval = interval
        self._pending: dict[int, tuple[Tensor, ...]] = {}
        self.ends: list[int] = []
        self._size = layouts[0].tokens_per_block if layouts else 1
        if layouts:
            last = last_end(prompt_end, self._size)
            wanted = {last, branch, *range(interval, last, interval)}
            self.ends = sorted(end for end in wanted if start < end <= last)
        self._kept = {*self.ends, prompt_end}

    @property
    def nbytes(self) -> int:
        """The memory of the snapshots in bytes."""
        return sum(one.nbytes for taken in self._pending.values() for one in taken)

    def take(self, layers: Sequence[Any], end: int) -> None:
        """Takes a snapshot of `layers` behind a pass that ended with token `end`, if it is due."""
        if not self._layouts or end % self._size:
            return
        if end % self._interval and end not in self._kept:
            return
        taken = snapshot_of(layers, self._layouts)
        if taken is not None:
            self._pending[end] = taken

    def until(self, end: int) -> list[tuple[int, tuple[Tensor, ...]]]:
        """Removes and returns the snapshots of up to `end` tokens, with their ends, ascending."""
        ready = [one for one in sorted(self._pending) if one <= end]
        return [(one, self._pending.pop(one)) for one in ready]

    def truncate(self, end: int) -> None:
        """Removes the snapshots of more than `end` tokens."""
        for one in [one for one in self._pending if one > end]:
            del self._pending[one]


def last_end(prompt_end: int, tokens_per_block: int) -> int:
    """Returns the last end of a block that leaves at least two tokens of a prompt to compute.

    Recurrent layers compute a single token with other code, which some models give other limits.
    """
    return max(0, prompt_end - 2) // tokens_per_block * tokens_per_block


def compute_until(
    model: PreTrainedModel,
    cache: DynamicCache,
    inputs: Mapping[str, object] | Tensor,
    ends: Sequence[int],
) -> None:
    """Computes a batch of prompts behind what `cache` holds, a pass up to each of `ends`.

    The device computes on when this returns. Passes are the model's own, with its hooks.

    Args:
        model: computes.
        cache: is filled.
        inputs: as `PromptCache.prefill` takes them, without padding.
        ends: tokens, ascending.
    """
    ids: Any = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
    ids = ids.to(model.device)
    names = inspect.signature(model.forward).parameters
    more: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    with torch.no_grad():
        for end in ends:
            part = ids[:, cache.get_seq_length() : end]
            positions = positions_of(model, cache, part)
            model(input_ids=part, past_key_values=cache, use_cache=True, **positions, **more)
