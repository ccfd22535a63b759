"""The memory of recurrent states on one rank: running slots, and the snapshots in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from kvconnect.engine.model.model import Model
from kvconnect.engine.model.pool_groups import state_layers
from kvconnect.engine.model.states import DividedStates, StateKey, StateSlots


class StateRestore(NamedTuple):
    """A copy of the snapshot `block`, the states after `num_tokens`, to the slot of a request."""

    request_id: int
    num_tokens: int
    block: int


class Snapshot(NamedTuple):
    """A copy of the states in the slot of a request to `block`."""

    request_id: int
    block: int


@dataclass(frozen=True, slots=True)
class StateWork:
    """The work on states in one step, but for its `StateRestore`s.

    Attributes:
        running: all running requests; the slots of others are freed before the step.
        snapshots: the snapshots that are taken after the step.
    """

    running: tuple[int, ...]
    snapshots: tuple[Snapshot, ...]


class StateMemory:
    """The states of running sequences, and the blocks of their snapshots.

    With several ranks each has its part of the states of running sequences, as far as ranks divide
    the mixers, and whole snapshots. So a snapshot serves engines of any number of ranks.

    Args:
        slots: the slots of the running sequences.
        blocks: the memory of all snapshots by state, ``[blocks, *shape]``; empty without them.
        divided: the states that ranks divide; ``None``: there are none.

    Attributes:
        slots: the slots of the running sequences.
    """

    def __init__(
        self,
        slots: StateSlots,
        blocks: Mapping[StateKey, Tensor],
        divided: DividedStates | None = None,
    ) -> None:
        self.slots = slots
        self._blocks = blocks
        self._divided = divided

    @classmethod
    def of(
        cls,
        model: Model,
        num_slots: int,
        states_of: Callable[[int], Mapping[str, Tensor]] | None,
    ) -> Self | None:
        """Returns the memory for `model`; ``None``: it has no recurrent layers.

        Args:
            model: the model.
            num_slots: the most sequences that run at once.
            states_of: returns the snapshots of a layer; see `BaseKVCacheManager.get_states`.
                ``None``: the cache keeps none.
        """
        if not model.states:
            return None
        blocks: dict[StateKey, Tensor] = {}
        if states_of is not None:
            numbers = state_layers(model)
            keys = [one.key for one in model.states]
            blocks = {key: states_of(numbers[key.layer_idx])[key.name] for key in keys}
        divided = model.divided_states
        shapes = model.states if divided is None else [divided.shape(one) for one in model.states]
        return cls(StateSlots(shapes, num_slots, model.device), blocks, divided)

    def restore(self, one: StateRestore) -> None:
        """Copies a snapshot to the slot of its request."""
        snapshot = self._snapshot(one.block)
        if self._divided is not None:
            snapshot = self._divided.part(snapshot)
        self.slots.restore(one.request_id, one.num_tokens, snapshot)

    def take(self, snapshots: Sequence[Snapshot]) -> None:
        """Copies the slots of requests to the blocks of `snapshots`.

        Collective where ranks divide states: every rank takes the same snapshots.
        """
        for request_id, block in snapshots:
            if self._divided is None:
                self.slots.copy_to(request_id, self._snapshot(block))
            else:
                parts = {key: one[0] for key, one in self.slots.copies([request_id]).items()}
                self._divided.gather(parts, self._snapshot(block))

    def _snapshot(self, block: int) -> dict[StateKey, Tensor]:
        return {key: states[block] for key, states in self._blocks.items()}
