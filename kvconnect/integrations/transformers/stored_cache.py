"""The cache of one ``generate()`` call: begins with what a store had, and is saved as it fills."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvconnect.connector.offload.messages import SaveOrder
from kvconnect.errors import UsageError
from kvconnect.integrations.core.access import StoreAccess
from kvconnect.integrations.transformers.cached_row import CachedRow
from kvconnect.integrations.transformers.ended_caches import EndedCaches
from kvconnect.integrations.transformers.restoring import Restored
from kvconnect.integrations.transformers.tensors import LayerTensors, as_blocks, tail_block
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import warn_once

__all__ = ["SavingTo", "StoredCache"]

# Saved as soon as so many tokens wait for it: each time costs about as much as a few blocks.
_SAVE_TOKENS = 256


@dataclass(frozen=True, slots=True, eq=False)
class SavingTo:
    """Where a cache is saved, and how.

    Attributes:
        store: where.
        layouts: of its pool groups.
        max_tokens: sequences beyond that are not saved any more; ``None``: no limit.
        at_end: save only at the end.
        ended: takes caches in that no one refers to any more.
    """

    store: StoreAccess
    layouts: tuple[KvCacheLayout, ...]
    max_tokens: int | None
    at_end: bool
    ended: EndedCaches


class StoredCache(DynamicCache):
    """What `PromptCache.prefill` returns, for ``generate(past_key_values=…)`` of one model.

    Holds keys and values of all layers from the first token on, also those that a sliding window
    does not reach any more: masks see to the window. `PromptCache` tells it which tokens each
    forward pass computes. Whole blocks are saved behind the pass that fills them, a few at a time;
    what is left, the last partly filled block included, when this object goes (which is when
    ``generate()`` returns, unless it was asked to return the cache), or by `save`.

    Attributes:
        loaded_tokens: tokens of each prompt that were loaded, and not computed.
        not_cached: why it neither was loaded nor is saved; empty: it is.
    """

    def __init__(
        self,
        saving: SavingTo | None,
        rows: Sequence[CachedRow] = (),
        restored: Restored | None = None,
        *,
        not_cached: str = "",
    ) -> None:
        super().__init__()
        restored = restored or Restored()
        self.not_cached = not_cached
        self.loaded_tokens = tuple(max(0, restored.num_tokens - row.offset) for row in rows)
        self._saving = saving
        # `PromptCache.flush` may save it while a pass computes elsewhere, or once it has ended.
        self._lock = threading.Lock()
        self._rows = list(rows)
        self._num_computed = restored.num_tokens  # of a row, padding included, by all layers
        self._num_loaded = restored.num_tokens
        self._prompt_end = max((row.offset + len(row.tokens) for row in rows), default=0)
        self._known = self._prompt_end  # tokens of a row, padding included, that rows know of
        self._begins_anew = False
        self._computing: Tensor | None = None
        self._computed: list[Tensor] = []  # behind what rows know of, not read yet
        for keys, values in restored.layers:
            layer = _new_layer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys.transpose(1, 2), values.transpose(1, 2)
            self.layers.append(layer)

    # ------------------------------------------------------------------ told by the model's hooks

    def num_repeated(self, input_ids: Tensor | None) -> int:
        """How many leading tokens of the next forward pass are loaded already.

        Assisted decoding begins with the whole prompt, whatever the cache holds.
        """
        if not self._begins_anew or input_ids is None or not self._num_loaded:
            return 0
        self._begins_anew = False
        whole = input_ids.shape[1] >= self._prompt_end
        return self._num_loaded if whole and self.get_seq_length() == self._num_loaded else 0

    def forward_begins(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, positions: Tensor | None
    ) -> None:
        """A forward pass computes these tokens next.

        Raises:
            UsageError: they do not go on with what was loaded: another prompt, another number of
                rows, other padding or positions. Nothing was computed.
        """
        with self._lock:
            self._begin(input_ids, attention_mask, positions)

    def _begin(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, positions: Tensor | None
    ) -> None:
        self._computing = None
        if not self._rows:
            return
        start = self.get_seq_length()
        if input_ids is None:
            self._end_or_raise("the model is called with embeddings instead of tokens")
        elif input_ids.shape[0] != len(self._rows):
            raise UsageError(
                f"past_key_values: prefill() was given {len(self._rows)} prompts, and generate() "
                f"computes {input_ids.shape[0]} sequences; beam search and num_return_sequences "
                "are not possible with a PromptCache: leave past_key_values out, or give the "
                "prompt several times"
            )
        elif not self._goes_on(input_ids, start):
            self._end_or_raise("other tokens are computed than prefill() was given")
        elif start == self._num_loaded and not self._placed_alike(attention_mask, positions, start):
            self._end_or_raise("attention_mask or position_ids are others than prefill() was given")
        else:
            self._computing = input_ids

    def forward_ended(self) -> None:
        """The forward pass is over; saves what is due. Never raises for a store's fault."""
        computed, self._computing = self._computing, None
        if computed is None:
            return
        with self._lock:
            self._num_computed = self.get_seq_length()
            self._take_in(computed)

    def _take_in(self, computed: Tensor) -> None:
        if not self._rows or self._saving is None:
            return
        end = self._num_computed
        if end > self._known:
            beyond = end - self._known - sum(one.shape[1] for one in self._computed)
            self._computed.append(computed[:, computed.shape[1] - beyond :])
        limit = self._saving.max_tokens
        if limit is not None and end - min(row.offset for row in self._rows) > limit:
            # From here on keys of all rows are others; those before are as they were.
            self._save_full(end - computed.shape[1])
            self._end()
            return
        if self._saving.at_end:
            return
        due = max(row.num_due(end - row.offset) for row in self._rows)
        size = self._saving.layouts[0].tokens_per_block
        if due * size >= _SAVE_TOKENS or (due and end == self._prompt_end):
            self._save_full(end)

    def _goes_on(self, input_ids: Tensor, start: int) -> bool:
        """Whether tokens that are known already are the same ones."""
        stop = min(self._known, start + input_ids.shape[1])
        if start >= stop:
            return True
        given = input_ids[:, : stop - start].to("cpu", torch.int32).numpy()
        for row, tokens in zip(self._rows, given, strict=True):
            low = max(start, row.offset)  # what padding is made of does not matter
            known = row.tokens.view[low - row.offset : stop - row.offset]
            if low < stop and not np.array_equal(known, tokens[low - start :]):
                return False
        return True

    def _placed_alike(self, mask: Tensor | None, positions: Tensor | None, start: int) -> bool:
        offsets = [row.offset for row in self._rows]
        if mask is None:
            if any(offsets):
                return False
        elif mask.ndim == 2:
            kept = mask.to("cpu").numpy() != 0
            end = min(kept.shape[1], self._prompt_end)
            wanted = np.arange(end) >= np.array(offsets)[:, None]
            if not np.array_equal(kept[:, :end], wanted):
                return False
        if positions is None or positions.ndim != 2:
            return True
        at = start + np.arange(positions.shape[1]) - np.array(offsets)[:, None]
        given = positions.to("cpu").numpy()
        return bool(np.all((given == at) | (at < 0)))

    # ------------------------------------------------------------------ saving

    def save(self) -> None:
        """Save what passes that are over have computed; from any thread.

        Never raises for a store's fault; blocks only if told to wait.
        """
        saving = self._saving
        if saving is None:
            return
        with self._lock:
            if not self._rows or not self._num_computed:
                return
            end = self._num_computed
            self._save_full(end)
            if saving.store.saves_tails and end == self._known:
                self._save_tails(end, saving)

    def _save_full(self, end: int) -> None:
        """The full blocks of the first `end` tokens."""
        saving = self._saving
        if saving is None:
            return
        self._read_computed()
        layers = self._tensors()
        for number, row in enumerate(self._rows):
            valid = min(end, self._known) - row.offset
            if not row.num_due(valid):
                continue
            with ExitStack() as attached:
                first_ids: list[int | None] = []
                for group, layout in enumerate(saving.layouts):
                    size = layout.tokens_per_block
                    low, high = row.num_done[group] * size, valid - valid % size
                    if low >= high:
                        first_ids.append(None)
                        continue
                    tokens = range(row.offset + low, row.offset + high)
                    blocks = as_blocks(layers, layout, number, tokens)
                    copier = saving.store.attached[group]
                    first_ids.append(attached.enter_context(copier.attached(blocks)))
                order = row.order(valid, first_ids)
                if _saved(saving.store, order) == len(order.blocks):
                    row.saved(valid)
                else:
                    row.open = False

    def _save_tails(self, end: int, saving: SavingTo) -> None:
        layers = self._tensors()
        size = saving.layouts[0].tokens_per_block
        for number, row in enumerate(self._rows):
            valid = end - row.offset
            if not row.open or valid % size == 0:
                continue
            tokens = range(row.offset + valid - valid % size, end)
            with ExitStack() as attached:
                first_ids = [
                    attached.enter_context(
                        copier.attached(tail_block(layers, layout, number, tokens))
                    )
                    for copier, layout in zip(saving.store.attached, saving.layouts, strict=True)
                ]
                order = row.tail_order(valid, first_ids)
                if order is not None:
                    _saved(saving.store, order)

    def _read_computed(self) -> None:
        """Take in the tokens of forward passes; the host waits for the device here."""
        if not self._computed:
            return
        computed, self._computed = torch.cat(self._computed, dim=1), []
        for row, tokens in zip(self._rows, computed.to("cpu", torch.int32).numpy(), strict=True):
            row.append(tokens)
        self._known += computed.shape[1]

    def _tensors(self) -> list[LayerTensors]:
        layers: list[Any] = self.layers
        return [(one.keys.transpose(1, 2), one.values.transpose(1, 2)) for one in layers]

    def _end(self) -> None:
        """It is not saved any more."""
        self._rows, self._computed = [], []

    def _end_or_raise(self, reason: str) -> None:
        if self._num_loaded:
            raise UsageError(
                f"past_key_values: {reason}; call prefill() with what generate() is called with"
            )
        warn_once("transformers.not_saved", f"PromptCache: {reason}; it is not saved")
        self._end()

    def __del__(self) -> None:
        # The saving happens elsewhere: this may run inside of any lock, on any thread.
        saving = getattr(self, "_saving", None)
        if saving is not None and getattr(self, "_rows", None):
            saving.ended.put(self)

    # ------------------------------------------------------------------ what generate() does to it

    def activate_past_recording(self) -> None:
        """As transformers': assisted decoding begins."""
        super().activate_past_recording()  # type: ignore[no-untyped-call]
        self._begins_anew = True

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers': the last tokens were rejected (assisted decoding)."""
        with self._lock:
            super().crop(tokens_to_remove)
            self._read_computed()
            end = self._num_computed = self.get_seq_length() if self.layers else 0
            if end < self._known and self._rows:
                for row in self._rows:
                    row.truncate(max(0, end - row.offset))
                self._known = end

    def reset(self) -> None:
        """As transformers'; nothing of it is saved any more."""
        with self._lock:
            super().reset()  # type: ignore[no-untyped-call]
            self._end()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: rows change places in beam search.

        Raises:
            UsageError: always.
        """
        self._refuse("beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused.

        Raises:
            UsageError: always.
        """
        self._refuse("repeating the rows of a batch")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refused.

        Raises:
            UsageError: always.
        """
        self._refuse("choosing among the rows of a batch")

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicCache:
        """A plain cache with the same content, which no store knows of."""
        copied = DynamicCache()
        layers: list[Any] = self.layers
        for layer in layers:
            other = _new_layer()
            if layer.is_initialized:
                other.update(layer.keys.clone(), layer.values.clone())
            copied.layers.append(other)
        return copied

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise UsageError(
            f"past_key_values: {what} is not possible with a PromptCache; leave it out of this call"
        )


def _new_layer() -> DynamicLayer:
    return DynamicLayer()  # type: ignore[no-untyped-call]


def _saved(store: StoreAccess, order: SaveOrder) -> int:
    return store.save(order.blocks, namespace=order.namespace)
