"""Moves recurrent states between running slots and the snapshots that the cache manager keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.engine.model.state_memory import Snapshot, StateMemory, StateRestore, StateWork
from kvconnect.request import LlmRequest


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
            ends with the last snapshot due in it, instead of the first. Beside a load it ends where
            the two meet, or where the load ends: no later chunk would reach that token.
    """
    due = kv.next_state_end(request, start)
    if due is None or due >= end:
        return end
    if stepped and start == 0 and request.load_end:
        return min(end, request.load_end)
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
        running: Collection[LlmRequest],
        loading: Collection[LlmRequest],
    ) -> StateWork:
        """Fills the slots with the states before the tokens of `plan`.

        Requests that may compute beside their load have these in their slots from their admission
        on. Allocates the blocks of the snapshots that are due after these tokens, so that a
        connector can order their saves in this step.

        Args:
            plan: the tokens that are computed next.
            running: all running requests.
            loading: all loading ones. The slots of other requests are freed.

        Returns:
            The work that other ranks have beside the copies that `restored` received.
        """
        requests = {one.request_id: one for one in (*running, *loading)}
        ids = tuple(requests)
        self.slots.keep(ids)
        for request in loading:
            if request.load_end:
                self._restore(request, request.num_computed_tokens)
        for one in plan:
            self._restore(requests[one.request_id], one.start)
        # All states were copied from their blocks, which these calls may reclaim.
        due = []
        for one in plan:
            request = requests[one.request_id]
            if self._kv.next_state_end(request, one.end - 1) != one.end:
                continue
            if (block := self._kv.state_snapshot(request, one.end)) is not None:
                due.append(Snapshot(one.request_id, block))
        self._snapshots = tuple(due)
        return StateWork(ids, self._snapshots)

    def end(self) -> None:
        """Takes the snapshots that are due after the tokens of the last plan."""
        self._memory.take(self._snapshots)

    def _restore(self, request: LlmRequest, start: int) -> None:
        """Copies the states before token `start` to the slot of `request` if it has others."""
        if not start or self.slots.holds(request.request_id, start):
            return
        if (block := self._kv.state_restore(request, start)) is not None:
            one = StateRestore(request.request_id, start, block)
            self._memory.restore(one)
            if self._restored is not None:
                self._restored(one)
