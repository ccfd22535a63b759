"""The messages of the leader to its followers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnect.cache.memory.sizing import PoolSizes
from kvconnect.connector.ranks.communicator import Instructions
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.state_memory import StateRestore, StateWork
from kvconnect.errors import RankDivergence

Int32Array: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy that the leader's block manager ordered: a call of a `BlockCopier`.

    Attributes:
        order: the method of `BlockCopier`.
        group: the group of the pool.
        sources, targets: block ids.
        num_tokens, from_host: the arguments of ``copy_tokens``.
    """

    order: Literal["onboard", "offload", "move", "copy_tokens"]
    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_tokens: int = 0
    from_host: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SequenceMessage:
    """A `SequenceStep`, with the changes of its block tables since the step before.

    Attributes:
        step: the sequence, without its block tables.
        lengths: the lengths of its block table in each pool group.
        places, blocks: by group, the indices in the table that changed, and their new blocks.
    """

    step: SequenceStep
    lengths: tuple[int, ...]
    places: tuple[Int32Array, ...]
    blocks: tuple[Int32Array, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepWork:
    """The work of a follower's model and memory in one step.

    Attributes:
        copies: the copies since the last step, in order; made before the step computes or loads.
            Copies of snapshots to running slots are among them, because later copies may write to
            the snapshots' blocks.
        sequences: the sequences to compute; none if every request of the step is loading, or if it
            is idle.
        states: the work on recurrent states; ``None``: there is none.
    """

    copies: tuple[BlockCopy | StateRestore, ...]
    sequences: tuple[SequenceMessage, ...]
    states: StateWork | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """The sizes of the leader's cache, which every rank's has.

    Attributes:
        sizes: the sizes of its pools.
        max_batch_size: the most sequences that run at once, each with a slot of recurrent states.
    """

    sizes: PoolSizes
    max_batch_size: int


@dataclass(frozen=True, slots=True)
class LifeSign:
    """A sign of life of the leader, without work."""


@dataclass(frozen=True, slots=True)
class Close:
    """The end of the engine: a follower drains what is staged, and ends."""


Message: TypeAlias = Instructions | StepWork | Setup | LifeSign | Close
"""The types of messages.

A step is `Instructions` with `StepWork` in them, or `StepWork` alone without connector."""


class PlanWriter:
    """Makes messages of plans. The reader must receive all of them, in order.

    Writer and reader keep the block tables of the last plan's sequences only.
    """

    def __init__(self) -> None:
        self._tables: dict[int, tuple[Int32Array, ...]] = {}

    def message(self, plan: Sequence[SequenceStep]) -> tuple[SequenceMessage, ...]:
        """Returns `plan` as messages."""
        tables = {one.request_id: tuple(map(_int32, one.tables)) for one in plan}
        made = tuple(self._sequence(one, tables[one.request_id]) for one in plan)
        self._tables = tables
        return made

    def _sequence(self, one: SequenceStep, tables: tuple[Int32Array, ...]) -> SequenceMessage:
        empty = np.empty(0, np.int32)
        before = self._tables.get(one.request_id, (empty,) * len(tables))
        places = tuple(map(_changed, before, tables))
        blocks = tuple(table[where] for table, where in zip(tables, places, strict=True))
        lengths = tuple(map(len, tables))
        return SequenceMessage(replace(one, tables=()), lengths, places=places, blocks=blocks)


class PlanReader:
    """Makes plans of messages; see `PlanWriter`."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[npt.NDArray[np.int64], ...]] = {}

    def plan(self, sequences: Sequence[SequenceMessage]) -> tuple[SequenceStep, ...]:
        """Returns the plan that was sent.

        Raises:
            RankDivergence: a table has indices without a block in any message.
        """
        plan = tuple(map(self._sequence, sequences))
        self._tables = {one.request_id: one.tables for one in plan}
        return plan

    def _sequence(self, sent: SequenceMessage) -> SequenceStep:
        empty = np.empty(0, np.int64)
        number = sent.step.request_id
        before = self._tables.get(number, (empty,) * len(sent.lengths))
        patches = zip(before, sent.lengths, sent.places, sent.blocks, strict=True)
        return replace(sent.step, tables=tuple(_patched(*patch, number) for patch in patches))


def _int32(table: npt.NDArray[np.int64]) -> Int32Array:
    return table.astype(np.int32)


def _changed(before: Int32Array, now: Int32Array) -> Int32Array:
    both = min(len(before), len(now))
    changed = np.flatnonzero(before[:both] != now[:both])
    return np.concatenate([changed, np.arange(both, len(now))]).astype(np.int32)


def _patched(
    before: npt.NDArray[np.int64],
    length: int,
    places: Int32Array,
    blocks: Int32Array,
    request_id: int,
) -> npt.NDArray[np.int64]:
    table = np.full(length, -2, np.int64)  # no block has this number, and -1 is none
    both = min(len(before), length)
    table[:both] = before[:both]
    table[places] = blocks
    if length and table.min() < -1:
        raise RankDivergence(f"request {request_id}: blocks of its table were never sent")
    return table
