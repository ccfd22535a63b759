"""Moves recurrent states between running slots and the snapshots that the cache manager keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.states import StateKey, StateSlots
from kvconnect.request import LlmRequest

__all__ = ["StateSnapshots", "snapshot_end"]


def snapshot_end(
    kv: BaseKVCacheManager, request: LlmRequest, start: int, end: int, *, stepped: bool
) -> int:
    """Returns the end of the chunk ``start..end`` of a prompt, moved to the next due snapshot.

    Args:
        kv: the cache manager.
        request: the request of the chunk.
        start: the first token of the chunk.
        end: the position after the last token that the budget allows.
        stepped: true if chunks after the first are computed token by token. Then the first chunk
            ends with the last snapshot due in it, instead of the first.
    """
    due = kv.next_state_end(request, start)
    if due is None or due >= end:
        return end
    if stepped and start == 0:
        last = min(end, request.num_tokens - 1)
        while (later := kv.next_state_end(request, due)) is not None and later <= last:
            due = later
    return due


class StateSnapshots:
    """The states of running sequences, and their snapshots at the ends of blocks.

    A request that reuses a prefix starts from the snapshot at its end. A cache manager without
    snapshots reuses no prefix.

    Args:
        slots: the slots of the running sequences.
        kv: the cache manager, which allocates the blocks of the snapshots.
        blocks: the memory of all snapshots by state, ``[blocks, *shape]``; empty without them.

    Attributes:
        slots: the slots of the running sequences.
    """

    def __init__(
        self, slots: StateSlots, kv: BaseKVCacheManager, blocks: Mapping[StateKey, Tensor]
    ) -> None:
        self.slots = slots
        self._kv = kv
        self._blocks = blocks
        self._due: list[tuple[int, int]] = []  # requests and the blocks of their snapshots

    def begin(
        self,
        plan: Sequence[SequenceStep],
        requests: Sequence[LlmRequest],
        running: Sequence[LlmRequest],
    ) -> StateSlots:
        """Returns the slots with the states before the tokens of `plan`.

        Allocates the blocks of the snapshots that are due after these tokens, so that a connector
        can order their saves in this step.

        Args:
            plan: the tokens that are computed next.
            requests: the requests of `plan`, in its order.
            running: all running requests; the slots of others are freed.
        """
        self.slots.keep({one.request_id for one in running})
        for one, request in zip(plan, requests, strict=True):
            if not one.start or self.slots.holds(one.request_id, one.start):
                continue
            if (block := self._kv.state_restore(request, one.start)) is not None:
                self.slots.restore(one.request_id, one.start, self._snapshot(block))
        # All states were copied from their blocks, which these calls may reclaim.
        self._due = []
        for one, request in zip(plan, requests, strict=True):
            if self._kv.next_state_end(request, one.end - 1) != one.end:
                continue
            if (block := self._kv.state_snapshot(request, one.end)) is not None:
                self._due.append((one.request_id, block))
        return self.slots

    def end(self) -> None:
        """Takes the snapshots that are due after the tokens of the last plan."""
        for request_id, block in self._due:
            self.slots.copy_to(request_id, self._snapshot(block))

    def _snapshot(self, block: int) -> dict[StateKey, Tensor]:
        return {key: states[block] for key, states in self._blocks.items()}
