"""Moves recurrent states between running slots and the snapshots that the cache manager keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.state_memory import Snapshot, StateMemory, StateRestore, StateWork
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
    """Decides which states are restored and which snapshots are taken, at the ends of blocks.

    A request that reuses a prefix starts from the snapshot at its end. A cache manager without
    snapshots reuses no prefix.

    Args:
        memory: the states of running sequences, and the memory of snapshots.
        kv: the cache manager, which allocates the blocks of the snapshots.
        restored: receives each copy of a snapshot to a slot right after it was made, in order with
            the copies of `kv`; other ranks make the same copies.

    Attributes:
        slots: the slots of the running sequences.
    """

    def __init__(
        self,
        memory: StateMemory,
        kv: BaseKVCacheManager,
        restored: Callable[[StateRestore], object] | None = None,
    ) -> None:
        self.slots = memory.slots
        self._memory = memory
        self._kv = kv
        self._restored = restored
        self._snapshots: tuple[Snapshot, ...] = ()

    def begin(
        self,
        plan: Sequence[SequenceStep],
        requests: Sequence[LlmRequest],
        running: Sequence[LlmRequest],
    ) -> StateWork:
        """Fills the slots with the states before the tokens of `plan`.

        Allocates the blocks of the snapshots that are due after these tokens, so that a connector
        can order their saves in this step.

        Args:
            plan: the tokens that are computed next.
            requests: the requests of `plan`, in its order.
            running: all running requests; the slots of others are freed.

        Returns:
            The work that other ranks have beside the copies that `restored` received.
        """
        ids = tuple(one.request_id for one in running)
        self.slots.keep(ids)
        for one, request in zip(plan, requests, strict=True):
            if not one.start or self.slots.holds(one.request_id, one.start):
                continue
            if (block := self._kv.state_restore(request, one.start)) is not None:
                self._restore(StateRestore(one.request_id, one.start, block))
        # All states were copied from their blocks, which these calls may reclaim.
        due = []
        for one, request in zip(plan, requests, strict=True):
            if self._kv.next_state_end(request, one.end - 1) != one.end:
                continue
            if (block := self._kv.state_snapshot(request, one.end)) is not None:
                due.append(Snapshot(one.request_id, block))
        self._snapshots = tuple(due)
        return StateWork(ids, self._snapshots)

    def end(self) -> None:
        """Takes the snapshots that are due after the tokens of the last plan."""
        self._memory.take(self._snapshots)

    def _restore(self, one: StateRestore) -> None:
        self._memory.restore(one)
        if self._restored is not None:
            self._restored(one)
