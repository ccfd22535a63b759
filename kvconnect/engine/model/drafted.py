"""Goes back from rejected drafts, which recurrent states contain like all other tokens.

The states before a step are kept for the sequences that have drafts in it, with what their mixers
were called with. If drafts are rejected, the mixers compute the accepted tokens again from these,
before the next step. No other layer runs, and no keys and values are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvconnect.engine.model.mixers import (
    Forward,
    ModelCache,
    PackedStates,
    SequenceRows,
    SequenceStates,
    called,
    mapped,
    parts,
)
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.states import StateSlots


class _Call(NamedTuple):
    """A call of a mixer: its arguments are the rows of the sequences with drafts."""

    mixer: Forward
    args: list[Any]
    named: dict[str, Any]
    stepped: bool


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A sequence with drafts: its step, its number among them, and its first recorded row."""

    step: SequenceStep
    number: int
    first: int


class DraftedStates(PackedStates):
    """The cache that a model is called with; sequences may have drafts.

    At most one copy of the states of each sequence with drafts is kept, until `StateSlots.proceed`.

    Args:
        plan: the sequences of the packed row.
        slots: the slots of the states.
        device: the device of the model.

    Raises:
        UsageError: see `StateSlots.begin`.
    """

    def __init__(
        self, plan: Sequence[SequenceStep], slots: StateSlots, device: torch.device
    ) -> None:
        super().__init__(plan, slots, device)
        self._kept = None
        drafted = [
            (one, chunk) for one, chunk in zip(plan, self.chunks, strict=True) if one.num_drafts
        ]
        if drafted:
            self._kept = _Kept(drafted, slots, device)
            slots.accepting.append(self._kept.accept)

    def run(
        self, mixer: Forward, args: Sequence[Any], named: Mapping[str, Any], *, stepped: bool
    ) -> Any:
        """Returns the output of `mixer` for the packed row; see `PackedStates.run`."""
        if self._kept is not None:
            self._kept.record(mixer, args, named, stepped=stepped)
        return super().run(mixer, args, named, stepped=stepped)


class _Kept:
    """The states before a step, and the calls of mixers in it, of the sequences with drafts."""

    def __init__(
        self,
        drafted: Sequence[tuple[SequenceStep, SequenceRows]],
        slots: StateSlots,
        device: torch.device,
    ) -> None:
        self._slots = slots
        self._device = device
        self._states = slots.copies([one.request_id for one, _ in drafted])
        self._drafted: dict[int, _Drafted] = {}
        self._calls: list[_Call] = []
        rows: list[int] = []
        for number, (one, chunk) in enumerate(drafted):
            self._drafted[one.request_id] = _Drafted(one, number, len(rows))
            rows += range(chunk.first, chunk.first + chunk.num_tokens)
        self._rows = torch.tensor(rows, device=device)

    def record(
        self, mixer: Forward, args: Sequence[Any], named: Mapping[str, Any], *, stepped: bool
    ) -> None:
        """Keeps the rows of the sequences with drafts of a mixer's arguments."""

        def pick(value: Tensor) -> Tensor:
            return value.index_select(1, self._rows)

        picked, by_name = mapped(args, named, pick, ModelCache())
        self._calls.append(_Call(mixer, picked, by_name, stepped))

    def accept(self, plan: Sequence[SequenceStep]) -> None:
        """Moves the slots of sequences with rejected drafts to the tokens that `plan` begins at."""
        chunks = []
        for one in plan:
            drafted = self._drafted.get(one.request_id)
            if drafted is None or not drafted.step.start < one.start < drafted.step.end:
                continue  # all were accepted
            if not self._slots.holds(one.request_id, drafted.step.end):
                continue  # it began anew
            kept = {key: states[drafted.number] for key, states in self._states.items()}
            slot = self._slots.restore(one.request_id, one.start, kept)
            chunks.append(
                SequenceRows(drafted.first, one.start - drafted.step.start, slot, begun=True)
            )
        if chunks:
            self._compute(chunks)

    @torch.inference_mode()
    def _compute(self, chunks: Sequence[SequenceRows]) -> None:
        """Moves the states in the slots of `chunks` from before their tokens to behind them."""
        at_once = parts(chunks, self._device)
        stepped = parts(chunks, self._device, stepped=True)
        for call in self._calls:
            for part in stepped if call.stepped else at_once:
                states = SequenceStates(self._slots, part)
                called(call.mixer, call.args, call.named, states)
                states.store()
