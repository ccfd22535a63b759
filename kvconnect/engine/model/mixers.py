"""Runs recurrent mixers, unmodified, on the packed row: once for each sequence.

A mixer is the module of a layer that keeps a state in transformers' cache: a gated delta net,
Mamba, lightning attention, a short convolution. It takes a batch of sequences of one length, not
several in one row. So its `forward` is called once for each sequence that begins, and once for all
others of one length: single tokens, and tokens with as many drafts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.states import StateKey, StateSlots
from kvconnect.errors import UsageError

Forward: TypeAlias = Callable[..., Any]


class SequenceRows(NamedTuple):
    """The tokens of one sequence in a packed row.

    Attributes:
        first: the row of the first token.
        num_tokens: their number.
        slot: the slot of the states.
        begun: true if the sequence has states before these tokens.
    """

    first: int
    num_tokens: int
    slot: int
    begun: bool


@dataclass(slots=True, eq=False)
class Part:
    """Sequences whose tokens a mixer computes in one call.

    Attributes:
        rows: the part of the packed row: a slice of one sequence, or ``[sequences, tokens]`` int64.
        slots: the slots of their states.
        begun: true if the sequences have states; otherwise their first token is in this call.
        index: the `slots` as a tensor.
    """

    rows: slice | Tensor
    slots: list[int]
    begun: bool
    index: Tensor


@dataclass(slots=True)
class _NoPositions:
    indexer_position_ids: Tensor | None = None


class ModelCache:
    """The cache that a model with recurrent layers is called with.

    Attributes:
        layer_idx: the model's number of the attention layer that runs now; -1: none ran yet. A
            module that several layers share does not know it.
        layers: the positions of tokens before, where indexers look for them: there are none.
        is_sliding: the attribute of transformers' caches; masks are not made from it.
        states: routes mixers to the states of each sequence; ``None``: each computes one sequence.
    """

    is_sliding: tuple[bool, ...] = ()
    states: PackedStates | None = None

    def __init__(self) -> None:
        self.layer_idx = -1
        self.layers: defaultdict[int, _NoPositions] = defaultdict(_NoPositions)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns `key` and `value` as they are, and notes the layer."""
        self.layer_idx = layer_idx
        return key, value


class PackedStates(ModelCache):
    """The cache that a model is called with: routes mixers to the states of each sequence.

    Keys and values of attention layers are returned unchanged, because the KV cache stores them.

    Args:
        plan: the sequences of the packed row.
        slots: the slots of the states.
        device: the device of the model.

    Attributes:
        chunks: the tokens of each sequence of `plan` in the packed row.

    Raises:
        UsageError: see `StateSlots.begin`.
    """

    def __init__(
        self, plan: Sequence[SequenceStep], slots: StateSlots, device: torch.device
    ) -> None:
        super().__init__()
        self.states = self
        self._plan = plan
        self._slots = slots
        self._num_tokens = sum(len(one.tokens) for one in plan)
        self.chunks = _chunks(plan, slots.begin(plan))
        self._parts = parts(self.chunks, device)
        self._stepped = parts(self.chunks, device, stepped=True)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns `key` and `value` as they are, and notes the layer.

        Raises:
            UsageError: layers came out of order.
        """
        if layer_idx <= self.layer_idx:
            raise UsageError(f"attention layer {layer_idx} ran behind layer {self.layer_idx}")
        return super().update(key, value, layer_idx)

    def run(
        self, mixer: Forward, args: Sequence[Any], named: Mapping[str, Any], *, stepped: bool
    ) -> Any:
        """Returns the output of `mixer` for the packed row, ``[1, tokens, …]``.

        Args:
            mixer: takes a batch of sequences, and a cache.
            args: its arguments for the packed row; this object is the cache.
            named: its keyword arguments for the packed row.
            stepped: true to compute a sequence that has states one token at a time.
        """
        whole: Any = None
        calls = self._stepped if stepped else self._parts
        for part in calls:
            states = SequenceStates(self._slots, part)
            result = called(mixer, args, named, states)
            states.store()
            if isinstance(result, tuple):  # some return their cache
                result = tuple(self if one is states else one for one in result)
            if len(calls) == 1 and isinstance(part.rows, slice):
                return result
            whole = self._placed(whole, result, part)
        return whole

    def end(self) -> None:
        """Notes that the states are those after the tokens of this step."""
        self._slots.end(self._plan)

    def _placed(self, whole: Any, result: Any, part: Part) -> Any:
        """Returns `whole`, made if it is ``None``, with the rows of `result`."""
        if isinstance(result, tuple):
            before = whole or [None] * len(result)
            return tuple(
                self._placed(one, new, part) for one, new in zip(before, result, strict=True)
            )
        if result is self:
            return self
        if not is_rows(result, part):
            return None  # weights of attention, which no model needs
        if whole is None:
            whole = result.new_empty(1, self._num_tokens, *result.shape[2:])
        if isinstance(part.rows, slice):
            whole[:, part.rows] = result
        else:
            whole[0].index_copy_(0, part.rows.flatten(), result.flatten(0, 1))
        return whole


class SequenceStates:
    """The states of the sequences of one call of a mixer, as transformers' cache has them.

    The methods are those of transformers' `Cache` and `LinearAttentionLayer`. A state before the
    first token is ``None``. Mixers may change a state in place.

    Args:
        slots: the slots of all states.
        part: the sequences of the batch, in order.
    """

    def __init__(self, slots: StateSlots, part: Part) -> None:
        self.part = part
        self._slots = slots
        self._gathered: dict[StateKey, Tensor] = {}
        self._updated: set[StateKey] = set()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the convolution's last inputs, ``[sequences, channels, kernel]``."""
        return self._get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the recurrent state, ``[sequences, …]``."""
        return self._get(StateKey(layer_idx, "recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns the state of MiniMax's lightning attention, which has a cache of its own."""
        return self._get(StateKey(layer_idx, "linear", 0))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Appends inputs of the convolution, and keeps the last of them.

        Returns:
            The state before and `conv_states`; zeros stand for what is missing before the first.
        """
        key = StateKey(layer_idx, "conv", state_idx)
        state = self._state(key)
        if self._has(key):
            full = torch.cat([state, conv_states], dim=-1)
        else:
            missing = max(0, state.shape[-1] - conv_states.shape[-1])
            full = nn.functional.pad(conv_states, (missing, 0))
        self._set(key, full[..., -state.shape[-1] :])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keeps the recurrent state, and returns it as it is kept."""
        return self._set(StateKey(layer_idx, "recurrent", state_idx), recurrent_states)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keeps the state of MiniMax's lightning attention."""
        self._set(StateKey(layer_idx, "linear", 0), linear_cache)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Returns whether the sequences have states before these tokens."""
        return self.part.begun

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: the states before drafts are kept in `drafted`."""
        return False

    def store(self) -> None:
        """Writes the states of a batch back into their slots."""
        for key, gathered in self._gathered.items():
            self._slots[key].index_copy_(0, self.part.index, gathered)

    def _has(self, key: StateKey) -> bool:
        return self.part.begun or key in self._updated

    def _get(self, key: StateKey) -> Tensor | None:
        return self._state(key) if self._has(key) else None

    def _set(self, key: StateKey, value: Tensor) -> Tensor:
        self._updated.add(key)
        return self._state(key).copy_(value)

    def _state(self, key: StateKey) -> Tensor:
        slots = self.part.slots
        if len(slots) == 1:
            return self._slots[key][slots[0] : slots[0] + 1]
        if (state := self._gathered.get(key)) is None:
            state = self._gathered[key] = self._slots[key].index_select(0, self.part.index)
        return state


def _chunks(plan: Sequence[SequenceStep], slots: Sequence[int]) -> list[SequenceRows]:
    chunks = []
    first = 0
    for one, slot in zip(plan, slots, strict=True):
        chunks.append(SequenceRows(first, len(one.tokens), slot, begun=one.start > 0))
        first += len(one.tokens)
    return chunks


def parts(
    chunks: Sequence[SequenceRows], device: torch.device, *, stepped: bool = False
) -> list[Part]:
    """Returns the calls of a mixer: one for each first chunk, and one for all others of one length.

    If `stepped`, chunks of sequences that have states are single tokens, one call after the other.
    """
    found = []
    calls: dict[tuple[int, int], list[SequenceRows]] = {}  # by offset and length
    for chunk in chunks:
        if not chunk.begun:
            found.append(_part([chunk], device))
        elif stepped:
            for offset in range(chunk.num_tokens):
                single = chunk._replace(first=chunk.first + offset, num_tokens=1)
                calls.setdefault((offset, 1), []).append(single)
        else:
            calls.setdefault((0, chunk.num_tokens), []).append(chunk)
    return found + [_part(alike, device) for _, alike in sorted(calls.items())]


def _part(chunks: Sequence[SequenceRows], device: torch.device) -> Part:
    """Returns the call for `chunks` of one length."""
    first, count, _, begun = chunks[0]
    slots = [chunk.slot for chunk in chunks]
    index = torch.tensor(slots, device=device)
    if len(chunks) == 1:
        return Part(slice(first, first + count), slots, begun, index)
    starts = torch.tensor([[chunk.first] for chunk in chunks], device=device)
    return Part(starts + torch.arange(count, device=device), slots, begun, index)


def is_rows(result: Any, part: Part) -> bool:
    """Returns whether `result` has a row for each token of `part`."""
    rows = part.rows
    shape = (1, rows.stop - rows.start) if isinstance(rows, slice) else tuple(rows.shape)
    return isinstance(result, Tensor) and result.shape[:2] == shape


def called(
    mixer: Forward, args: Sequence[Any], named: Mapping[str, Any], states: SequenceStates
) -> Any:
    """Returns the output of `mixer` for the sequences of `states`, with their rows of `args`."""
    rows = states.part.rows

    def pick(value: Tensor) -> Tensor:
        return value[:, rows] if isinstance(rows, slice) else value[0, rows]

    picked, by_name = mapped(args, named, pick, states)
    return mixer(*picked, **by_name)


def mapped(
    args: Sequence[Any], named: Mapping[str, Any], pick: Callable[[Tensor], Tensor], cache: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Returns a mixer's arguments with `pick` applied to the tensors, and another `cache`.

    ``kv``, an argument of attention, is left out: kernels of mixers refuse unknown ones.
    """

    def change(value: Any) -> Any:
        if isinstance(value, ModelCache):
            return cache
        if isinstance(value, (tuple, list)):
            return type(value)(change(one) for one in value)
        return pick(value) if isinstance(value, Tensor) else value

    by_name = {name: change(value) for name, value in named.items() if name != "kv"}
    return [change(value) for value in args], by_name
