"""The rows of a batch: prompts, their keys, and the blocks that the store still lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvconnect.backend import DEFAULT_RETENTION_PRIORITY
from kvconnect.connector.io.lookup import Hit
from kvconnect.connector.io.orders import SaveOrder
from kvconnect.connector.pair.save_plan import SavePlan
from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.transformers.snapshots import last_end
from kvconnect.integrations.transformers.structure import Change
from kvconnect.keys import KeyChain
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest
from kvconnect.text import shown
from kvconnect.tokens import TokenArray

_TEXT = {"input_ids", "attention_mask"}


class PromptRow(NamedTuple):
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


class CachedRow:
    """A sequence that grows. Not thread-safe.

    Args:
        request: the prompt, with its keys.
        offset: tokens of padding before it.
        layouts: the layouts of the store's pool groups.

    Attributes:
        offset: tokens of padding before it.
        tokens: prompt, then what was generated and computed.
        open: whether it is still saved; a block that is not stored hides those behind it.
    """

    def __init__(self, request: LlmRequest, offset: int, layouts: Sequence[KvCacheLayout]) -> None:
        self.offset = offset
        self.tokens = request.tokens
        self.open = True
        self._chain = request.key_chain
        # For windows, too, all tokens are present; for states those with a snapshot.
        size = self._chain.tokens_per_block
        windows = [size if layout.kind == "state" else None for layout in layouts]
        self._plan = SavePlan(request, windows=windows)
        self._has_states = any(layout.kind == "state" for layout in layouts)

    def asked(self, most: int | None = None) -> KeyChain:
        """Returns a copy of the keys and tokens, for a lookup in the store.

        Args:
            most: use at most so many tokens, a multiple of the block size; ``None``: no limit but
                `snapshots.last_end`, with states.
        """
        if most is None and self._has_states:
            most = last_end(len(self.tokens), self._chain.tokens_per_block)
        self._chain.keys()  # hashed here, once for all lookups
        return self._chain.snapshot(None if most is None else most + 1)

    def note_hit(self, hit: Hit) -> None:
        """Records the blocks that the store has."""
        self._plan.note_stored(hit.num_stored, hit.tail)

    def note_missing(self, num_tokens: int) -> None:
        """Records that tokens behind the first `num_tokens` could not be loaded."""
        self._plan.note_missing(num_tokens // self._chain.tokens_per_block)

    def append(self, tokens: TokenArray) -> None:
        """Appends computed tokens."""
        self.tokens.extend(tokens)

    def truncate(self, num_tokens: int) -> None:
        """Removes all but the first `num_tokens` tokens."""
        self.tokens.truncate(num_tokens)
        self._chain.truncate(num_tokens)
        self.note_missing(num_tokens)

    def is_due(self, num_full: int) -> bool:
        """Returns whether one of the first `num_full` blocks is to be saved in any group."""
        return self.open and self._plan.is_due(num_full)

    def order(
        self, ids_by_group: Sequence[Sequence[int]], num_full: int, tail_end: int | None = None
    ) -> SaveOrder | None:
        """Returns the blocks to save, which count as stored from now on.

        Args:
            ids_by_group: for each pool group the ids of all blocks of the row; -1: not needed.
            num_full: full blocks whose keys and values are computed.
            tail_end: save the partly filled block behind them, too, which ends with this token.
        """
        self._plan.forget_blocks()
        priorities = [DEFAULT_RETENTION_PRIORITY] * len(ids_by_group[0])
        self._plan.extend(ids_by_group, priorities)
        return self._plan.order(num_full, 0, tail_end)
