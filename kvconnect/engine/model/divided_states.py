"""The recurrent states of a model whose ranks divide the mixers, and how they become whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvconnect.engine.model.sharding import ModelRanks
from kvconnect.engine.model.states import StateKey, StateShape


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
