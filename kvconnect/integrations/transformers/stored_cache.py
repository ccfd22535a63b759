"""The cache of one ``generate()`` call: begins with what a store had, and is saved as it fills."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.errors import UsageError
from kvconnect.integrations.transformers.cache_layers import (
    attention_layers,
    cached_tensors,
    can_crop,
    copied_cache,
    fill_keys,
    fill_states,
    layer_tensors,
)
from kvconnect.integrations.transformers.passes import ComputedPass, placement
from kvconnect.integrations.transformers.restoring import Restored
from kvconnect.integrations.transformers.rows import CachedRow
from kvconnect.integrations.transformers.saving import SavingTo, save_rows
from kvconnect.integrations.transformers.snapshots import Snapshots
from kvconnect.integrations.transformers.structure import Change
from kvconnect.tokens import TokenArray


class StoredCache(DynamicCache):
    """The result of `PromptCache.prefill`, for ``generate(past_key_values=…)`` of one model.

    Holds keys and values of all layers from the first token on, also those beyond a sliding window:
    masks apply the window. `PromptCache` reports the tokens of each forward pass. Only consecutive
    plain causal passes of this model are saved, once `PromptCache` has found the model unchanged. A
    pass of another kind, or any other write here, ends the saving.

    Attributes:
        loaded_tokens: the number of tokens of each prompt that were loaded instead of computed.
        not_cached: the reason why no token is loaded or saved; empty: none.
        snapshots: the states that are to be saved with it.
    """

    def __init__(
        self,
        saving: SavingTo | None,
        rows: Sequence[CachedRow] = (),
        restored: Restored | None = None,
        *,
        layers: Sequence[Any] = (),
        not_cached: str = "",
    ) -> None:
        super().__init__()
        restored = restored or Restored()
        self.layers = list(layers)
        self.not_cached = not_cached
        self.loaded_tokens = tuple(max(0, restored.num_tokens - row.offset) for row in rows)
        self._saving = saving
        # It may be saved while a pass computes elsewhere, or once it has ended.
        self._lock = threading.Lock()
        self._rows = list(rows)
        self._num_loaded = restored.num_tokens  # per row, with padding; see `prefilled`
        self._num_computed = restored.num_tokens  # by plain passes, or loaded
        self._num_marked = 0
        self._num_checked = 0  # tokens computed before the last good check
        self._num_saved = restored.num_tokens
        self._least = restored.least
        self._disowned: Change | None = None
        self._prompt_end = max((row.offset + len(row.tokens) for row in rows), default=0)
        self._known = self._prompt_end  # tokens of a row, padding included, that rows know of
        self._followed = saving is not None and bool(rows)
        self._begins_anew = False
        self._computing: ComputedPass | None = None
        self._unread: list[ComputedPass] = []
        self._copied: Any = None  # an event behind all that was computed, on CUDA
        states = () if saving is None else saving.geometry.states
        self.snapshots = Snapshots(
            states,
            0 if saving is None else saving.state_interval,
            start=restored.num_tokens,
            branch=restored.branch,
            prompt_end=self._prompt_end,
        )
        fill_keys(self.layers, restored.layers)
        if restored.num_tokens:
            fill_states(self.layers, states, restored.states)
        self._stamp = self._tensor_stamp()

    def prefilled(self) -> None:
        """Records that all tokens until now were computed in `prefill`, and count as loaded."""
        self._num_loaded = self.get_seq_length()

    # ------------------------------------------------------------------ called by the model's hooks

    def num_repeated(self, input_ids: Tensor | None) -> int:
        """Returns how many leading tokens of the next forward pass are loaded already.

        Assisted decoding begins with the whole prompt, whatever the cache holds.
        """
        if not self._begins_anew or input_ids is None or not self._num_loaded:
            return 0
        self._begins_anew = False
        whole = input_ids.shape[1] >= self._prompt_end
        return self._num_loaded if whole and self.get_seq_length() == self._num_loaded else 0

    def forward_begins(self, given: Mapping[str, Any]) -> None:
        """Records the pass that computes next; `given` are its arguments by name.

        Raises:
            UsageError: it does not continue the loaded tokens: another prompt, another number of
                rows, other padding or positions, a model that has changed. Nothing was computed.
        """
        with self._lock:
            self._computing = None
            if self._disowned is not None:
                self._end_or_raise(self._disowned)
            if not self._followed:
                return
            ids = given.get("input_ids")
            if ids is not None and ids.shape[0] != len(self._rows):
                raise UsageError(
                    f"past_key_values: prefill() was given {len(self._rows)} prompts, and "
                    f"generate() computes {ids.shape[0]} sequences; beam search and "
                    "num_return_sequences are not possible with a PromptCache: leave "
                    "past_key_values out, or give the prompt several times"
                )
            found = self._begin(given)
            if isinstance(found, Change):
                self._end_or_raise(found)
            else:
                self._computing = found

    def _begin(self, given: Mapping[str, Any]) -> ComputedPass | Change:
        start = self.get_seq_length()
        if start != self._num_computed or self._is_foreign():
            return Change(Doubt.FOREIGN_PASS, "")
        conditions = placement(given, start, [row.offset for row in self._rows])
        if isinstance(conditions, Doubt):
            return Change(conditions, "")
        ids: Tensor = given["input_ids"]
        if not self._goes_on(ids, start):
            return Change(Doubt.OTHER_TOKENS, "")
        on_loaded = start == self._num_loaded > 0
        if on_loaded and not all(map(bool, conditions)):
            return Change(Doubt.MASK, "attention_mask or position_ids are others than prefill()'s")
        end = start + ids.shape[1]
        unknown = end - max(start, self._known_soon())
        beyond = ids[:, ids.shape[1] - max(0, unknown) :]
        if (saving := self._saving) is not None:
            # Checked when generate() begins; a step has no time for it.
            changed = saving.guard.glance() if on_loaded or ids.shape[1] > 1 else None
            if changed := changed or saving.guard.autocast_doubt():
                return changed
            limit, longest = saving.geometry.limit, end - min(row.offset for row in self._rows)
            if limit is not None and longest > limit.num_tokens:
                # Keys of all rows are others from here on; those before are as they were.
                self._followed = False
            if saving.geometry.states and ids.shape[1] == 1:
                # Not what a prompt of these tokens computes: see `snapshots.last_end`.
                self._followed = False
        return ComputedPass(start, end, beyond, conditions)

    def forward_ended(self, *, succeeded: bool) -> None:
        """Records that the pass is over."""
        with self._lock:
            computed, self._computing = self._computing, None
            if computed is None:
                return
            layers = attention_layers(self.layers).values()
            if not succeeded or any(one.get_seq_length() != computed.end for one in layers):
                self._followed = False
            if not self._followed:
                return
            self._num_computed = computed.end
            self.snapshots.take(self.layers, computed.end)
            self._unread.append(computed)
            self._stamp = self._tensor_stamp()
            device = computed.beyond.device
            if device.type == "cuda":
                self._copied = torch.cuda.current_stream(device).record_event()

    def _goes_on(self, input_ids: Tensor, start: int) -> bool:
        """Returns whether the tokens that are known already are the same as in `input_ids`."""
        stop = min(self._known, start + input_ids.shape[1])
        if start >= stop:
            return True
        given = input_ids[:, : stop - start].to("cpu", torch.int32).numpy()
        for row, tokens in zip(self._rows, given, strict=True):
            low = max(start, row.offset)  # the ids of padding do not matter
            known = row.tokens.view[low - row.offset : stop - row.offset]
            if low < stop and not np.array_equal(known, tokens[low - start :]):
                return False
        return True

    def _known_soon(self) -> int:
        """Returns how many tokens of a row are known once all passes are read."""
        return self._known + sum(one.beyond.shape[1] for one in self._unread)

    def _tensor_stamp(self) -> list[tuple[int, int]]:
        """Returns a stamp that changes if anything cached is replaced or written to."""
        return [
            (id(one), 0 if one.is_inference() else one._version)  # noqa: SLF001  documented
            for one in cached_tensors(self.layers)
        ]

    def _is_foreign(self) -> bool:
        """Returns whether keys or values were replaced since the last pass; forgets all if so.

        Returns False during a pass and after the last plain one: those passes write behind the
        known tokens.
        """
        if not self._followed or self._computing is not None:
            return False
        if self._stamp == self._tensor_stamp():
            return False
        self._followed = False
        self._num_computed = self._num_marked = self._num_checked = 0
        return True

    def _end_or_raise(self, change: Change) -> None:
        """Ends saving; raises if loaded tokens would be used by another computation."""
        if self._num_loaded and self.get_seq_length() == self._num_loaded:
            reason = ": ".join(filter(None, (change.doubt.sentence, change.detail)))
            raise UsageError(
                f"past_key_values: {reason}; call prefill() with what generate() is called with"
            )
        if self._followed:
            note_doubt(*change)
        self._followed = False

    # ------------------------------------------------------------------ saving

    @property
    def nbytes(self) -> int:
        """The memory of keys, values, states and their snapshots in bytes."""
        return self.snapshots.nbytes + sum(one.nbytes for one in cached_tensors(self.layers))

    def mark(self) -> bool:
        """Records that a check of the model begins, which covers everything computed until now.

        Returns:
            Whether something of that is not saved yet.
        """
        with self._lock:
            self._num_marked = self._num_computed
            return self._num_marked > self._num_saved

    def begins_like(self, tokens: TokenArray) -> bool:
        """Returns whether some row begins with all of `tokens`."""
        count = len(tokens)
        return any(np.array_equal(row.tokens.view[:count], tokens) for row in self._rows)

    def vouch(self) -> None:
        """Accepts the check that began with `mark`: `save` may save what was computed then."""
        with self._lock:
            self._num_checked = self._num_marked

    def disown(self, change: Change) -> None:
        """Rejects the check: nothing is saved any more, and loaded tokens are not valid."""
        with self._lock:
            self._num_marked = self._num_checked = 0
            self._disowned = change
            self._followed = False

    def save(self, *, whole: bool) -> None:
        """Saves everything computed before the last good check. Any thread may call this.

        Never raises for a store's fault. Blocks only if the store's settings say so.

        Args:
            whole: the partly filled last block, too.
        """
        saving = self._saving
        with self._lock:
            if saving is None or not self._num_checked or self._is_foreign():
                return
            if self._copied is not None:
                self._copied.synchronize()
            self._read_computed()
            end = min(self._num_checked, self._num_computed, self._known)
            tails = whole and end == self._known
            tensors = layer_tensors(self.layers)
            for at, snapshot in self.snapshots.until(end):
                save_rows(saving, self._rows, tensors, at, snapshot=snapshot, tails=False)
            save_rows(saving, self._rows, tensors, end, tails=tails)
            if whole:
                self._num_saved = end

    def _read_computed(self) -> None:
        """Reads the tokens of plain passes; the host waits for the device here."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        for number, one in enumerate(unread):
            if not all(map(bool, one.plain)):
                self._num_computed = one.start
                self._followed = False
                unread = unread[:number]
                break
        beyond = torch.cat([one.beyond for one in unread], dim=1)
        for row, tokens in zip(self._rows, beyond.to("cpu", torch.int32).numpy(), strict=True):
            row.append(tokens)
        self._known += beyond.shape[1]

    def __del__(self) -> None:
        # The saving happens elsewhere: this may run inside of any lock, on any thread.
        saving = getattr(self, "_saving", None)
        if saving is None or self._disowned is not None or saving.guard.doubt is not None:
            return
        if self._num_computed > self._num_saved:
            saving.ended.put(self)

    # ------------------------------------------------------------------ what generate() does to it

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Updates as transformers does. Outside of a pass that began here, it ends the saving."""
        if self._computing is None and self._followed:
            self._followed = False
            note_doubt(Doubt.FOREIGN_PASS)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Records as transformers does that assisted decoding begins."""
        super().activate_past_recording()  # type: ignore[no-untyped-call]
        self._begins_anew = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, which assisted decoding rejected, as transformers does.

        Raises:
            UsageError: recurrent states, or loaded windows, cannot go back. Nothing was removed.
        """
        with self._lock:
            if not can_crop(self.layers):
                self._refuse("taking tokens back from recurrent states")
            left = tokens_to_remove + self.get_seq_length() * (tokens_to_remove <= 0)
            if 0 < left < self._least:
                self._refuse("taking back loaded tokens of a model with windows")
            self._least = min(self._least, max(0, left))
            self._is_foreign()
            super().crop(tokens_to_remove)
            self._read_computed()
            end = min(self._num_computed, self.get_seq_length() if self.layers else 0)
            self._num_computed = end
            self._num_marked = min(self._num_marked, end)
            self._num_checked = min(self._num_checked, end)
            self._num_saved = min(self._num_saved, end)
            self.snapshots.truncate(end)
            if end < self._known:
                for row in self._rows:
                    row.truncate(max(0, end - row.offset))
                self._known = end
            self._stamp = self._tensor_stamp()

    def reset(self) -> None:
        """Resets as transformers does; the cache is no longer saved."""
        with self._lock:
            super().reset()  # type: ignore[no-untyped-call]
            self._followed = False
            self._num_computed = self._num_marked = self._num_checked = self._least = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuses: rows change places in beam search.

        Raises:
            UsageError: always.
        """
        self._refuse("beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuses to repeat rows.

        Raises:
            UsageError: always.
        """
        self._refuse("repeating the rows of a batch")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuses to select rows.

        Raises:
            UsageError: always.
        """
        self._refuse("choosing among the rows of a batch")

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicCache:
        """Returns a plain cache with the same content, which is not saved."""
        return copied_cache(self.layers)

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise UsageError(
            f"past_key_values: {what} is not possible with a PromptCache; leave it out of this call"
        )
