"""Keeps recurrent states: one slot of memory for each running sequence, or a part on each rank.

A recurrent layer keeps one state that stands for all tokens before it, instead of keys and values
of each. `mixers` gives models these states through the interface of transformers' own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.sharding import ModelRanks
from kvconnect.errors import UsageError

StateKind: TypeAlias = Literal["conv", "recurrent", "linear"]
"""The three pairs of methods by which transformers' caches read and write states."""


class StateKey(NamedTuple):
    """The name of a state: its layer, its kind, and its number among those of a layer."""

    layer_idx: int
    kind: StateKind
    state_idx: int

    @property
    def name(self) -> str:
        """The name of the state in its layer."""
        return f"{self.kind}{self.state_idx}"


@dataclass(frozen=True, slots=True)
class StateShape:
    """A state of one sequence.

    Attributes:
        key: the name of the state.
        shape: without the dimension of the batch.
        dtype: in which the model keeps it, which may differ from the model's own.
    """

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Held(NamedTuple):
    """The content of a slot: the states after `num_tokens` of a request."""

    request_id: int
    num_tokens: int


class StateSlots:
    """The states of all running sequences, one slot each.

    A sequence whose first token is computed begins without any state, whatever its slot held. Every
    other sequence continues from the states after exactly the tokens before; other states in its
    slot are an error.

    Args:
        shapes: the shapes of the model.
        num_slots: the most sequences that run at once.
        device: the device of the model.

    Attributes:
        accepting: functions that compute the states of sequences whose drafts in the last step were
            rejected, for the tokens that are computed next. `drafted` adds them.
    """

    def __init__(self, shapes: Sequence[StateShape], num_slots: int, device: torch.device) -> None:
        self._states = {
            one.key: torch.zeros(num_slots, *one.shape, dtype=one.dtype, device=device)
            for one in shapes
        }
        self._held: list[_Held | None] = [None] * num_slots
        self._slots: dict[int, int] = {}
        self.accepting: list[Callable[[Sequence[SequenceStep]], None]] = []

    def __len__(self) -> int:
        """Returns how many slots are in use."""
        return len(self._slots)

    def __getitem__(self, key: StateKey) -> Tensor:
        """Returns a state of all slots, ``[slots, *shape]``; see `StateShape`."""
        return self._states[key]

    def keep(self, request_ids: Collection[int]) -> None:
        """Frees the slots of all requests but `request_ids`, which are those that run."""
        for request_id in self._slots.keys() - request_ids:
            self._held[self._slots.pop(request_id)] = None
        if not self._slots:
            self.accepting.clear()  # holds memory

    def holds(self, request_id: int, num_tokens: int) -> bool:
        """Returns whether a slot holds the states after `num_tokens` of a request."""
        slot = self._slots.get(request_id)
        return slot is not None and self._held[slot] == (request_id, num_tokens)

    def restore(self, request_id: int, num_tokens: int, snapshot: Mapping[StateKey, Tensor]) -> int:
        """Copies the states after `num_tokens` of a request into its slot, and returns the slot.

        Raises:
            UsageError: all slots are in use.
        """
        slot = self._slot(request_id)
        for key, state in snapshot.items():
            self._states[key][slot].copy_(state)
        self._held[slot] = _Held(request_id, num_tokens)
        return slot

    def copy_to(self, request_id: int, snapshot: Mapping[StateKey, Tensor]) -> None:
        """Copies the states of a request into `snapshot`."""
        slot = self._slots[request_id]
        for key, state in snapshot.items():
            state.copy_(self._states[key][slot])

    def copies(self, request_ids: Sequence[int]) -> dict[StateKey, Tensor]:
        """Returns copies of the states of running requests, ``[requests, *shape]``."""
        slots = [self._slots[one] for one in request_ids]
        return {key: states[slots] for key, states in self._states.items()}

    def proceed(self, plan: Sequence[SequenceStep]) -> None:
        """Goes back to the accepted drafts of the last step, where `plan` continues there.

        The copies that were kept for that are freed. Called once, before the states of a step are
        used.
        """
        for accept in self.accepting:
            accept(plan)
        self.accepting.clear()

    def begin(self, plan: Sequence[SequenceStep]) -> list[int]:
        """Returns the slot of each sequence of `plan`, whose tokens are computed next.

        Until `end`, the content of these slots is undefined.

        Raises:
            UsageError: a slot does not hold the states before a sequence's tokens, or all slots
                are in use.
        """
        for one in plan:
            if one.start and not self.holds(one.request_id, one.start):
                slot = self._slots.get(one.request_id)
                raise UsageError(
                    f"request {one.request_id} continues at token {one.start}, and the recurrent "
                    f"states are those of {'no slot' if slot is None else self._held[slot]}"
                )
        slots = [self._slot(one.request_id) for one in plan]
        for slot in slots:
            self._held[slot] = None
        return slots

    def end(self, plan: Sequence[SequenceStep]) -> None:
        """Notes that the slots hold the states after the tokens of `plan`."""
        for one in plan:
            self._held[self._slots[one.request_id]] = _Held(one.request_id, one.end)

    def _slot(self, request_id: int) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            free = set(range(len(self._held))) - set(self._slots.values())
            if not free:
                raise UsageError(
                    f"{len(self._held)} sequences hold recurrent states, and request {request_id} "
                    "is one too many"
                )
            slot = self._slots[request_id] = min(free)
        return slot


class StateRows(NamedTuple):
    """The rows of a whole state, along its first dimension, that a rank has.

    Attributes:
        rows: their indices in the whole state, int64, in the order of the rank's state.
        own: the indices in `rows` of those that no rank before has, int64.
    """

    rows: Tensor
    own: Tensor

    @classmethod
    def of(cls, parts: Sequence[Tensor], rank: int, device: torch.device) -> Self:
        """Returns the rows of `rank`, from those of all ranks."""
        before = torch.cat([parts[0][:0], *parts[:rank]])
        new = ~torch.isin(parts[rank], before)
        return cls(parts[rank].to(device), new.nonzero()[:, 0].to(device))


@dataclass(frozen=True, slots=True, eq=False)
class DividedStates:
    """The division of states among ranks. A running sequence has its part, a snapshot all.

    Attributes:
        ranks: the ranks.
        rows: the rows of each divided state; every rank has the other states whole.
    """

    ranks: ModelRanks
    rows: Mapping[StateKey, StateRows]

    def shape(self, one: StateShape) -> StateShape:
        """Returns the shape of this rank's part of a state."""
        if (found := self.rows.get(one.key)) is None:
            return one
        return replace(one, shape=(len(found.rows), *one.shape[1:]))

    def part(self, snapshot: Mapping[StateKey, Tensor]) -> dict[StateKey, Tensor]:
        """Returns this rank's part of whole states."""
        return {
            key: whole[self.rows[key].rows] if key in self.rows else whole
            for key, whole in snapshot.items()
        }

    def gather(self, parts: Mapping[StateKey, Tensor], snapshot: Mapping[StateKey, Tensor]) -> None:
        """Fills `snapshot` with the states that the ranks have `parts` of.

        Collective: every rank calls this with the same states. Blocks until all came.

        Raises:
            RankLost: see `ModelRanks.all_reduce`. The content of `snapshot` is undefined.
        """
        divided: dict[torch.dtype, list[StateKey]] = {}
        for key, whole in snapshot.items():
            if (found := self.rows.get(key)) is None:
                whole.copy_(parts[key])
                continue
            whole.zero_()
            whole[found.rows[found.own]] = parts[key][found.own]
            divided.setdefault(whole.dtype, []).append(key)
        for keys in divided.values():
            wholes = [snapshot[key] for key in keys]
            together = torch.cat([whole.flatten() for whole in wholes])
            self.ranks.all_reduce(together)
            sums = together.split_with_sizes([whole.numel() for whole in wholes])
            for whole, one in zip(wholes, sums, strict=True):
                whole.copy_(one.view(whole.shape))
