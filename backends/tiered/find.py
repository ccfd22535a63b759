"""The search for blocks in all tiers of a tiered store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvconnect.backend import MAX_CHILDREN, Child, StoredEntry
from kvconnect.backends.tiered.tier import Tier
from kvconnect.keys import BlockKey

# The number of abandoned lookups above which a tier counts as slow.
_MAX_UNANSWERED = 32


class TieredFinder:
    """Looks blocks up in all tiers at once, and waits for each at most `patience_s`.

    Args:
        tiers: in order.
        patience_s: seconds that a lookup waits for a tier.
    """

    def __init__(self, tiers: Sequence[Tier], patience_s: float) -> None:
        self._tiers = tiers
        self._patience_s = patience_s
        self._unanswered: dict[asyncio.Task[int], Tier] = {}

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present, each in any tier.

        Returns as soon as one tier has all remaining keys, and at the latest after twice
        `patience_s`: if tiers hold successive parts of the prefix, each part needs another round.
        """
        loop = asyncio.get_running_loop()
        start, patience = loop.time(), self._patience_s
        found = 0
        ends: dict[Tier, int] = {}
        while found < len(keys):
            # A tier whose run ended here does not have the next block.
            asked = [tier for tier in self._tiers if tier.prompt and ends.get(tier) != found]
            spent = loop.time() - start if found else 0.0
            if spent > 2 * patience:
                break
            counts = await self._ask(asked, keys[found:], max(patience - spent, patience / 8))
            if not any(counts.values()):
                break
            ends.update((tier, found + number) for tier, number in counts.items())
            found += max(counts.values())
        return found

    def close(self) -> None:
        """Cancels the lookups that no caller waits for."""
        for task in self._unanswered:
            task.cancel()

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns the children of `key` in all tiers that answer within `patience_s`."""
        listing = [
            tier for tier in self._tiers if tier.prompt and tier.guard.capabilities.enumerable
        ]
        tasks = [asyncio.create_task(tier.answer(tier.guard.children(key), ())) for tier in listing]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._patience_s)
            for task in late:
                task.cancel()
        found: dict[BlockKey, Child] = {}
        for task in tasks:
            if task.done() and not task.cancelled():
                for child in task.result():
                    found.setdefault(child.key, child)
        return list(found.values())[:MAX_CHILDREN]

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields the entries of all tiers that list them; a block only from its first tier."""
        # A part of each key identifies the block, and takes less memory.
        seen: set[bytes] = set()
        for tier in self._tiers:
            if not (tier.alive and tier.guard.capabilities.enumerable):
                continue
            async for entry in tier.guard.scan():
                short = entry.key[:12]
                if short not in seen:
                    seen.add(short)
                    yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns the entry of each of `keys` in the first tier that has one."""
        found: list[StoredEntry | None] = [None] * len(keys)
        for tier in self._tiers:
            missing = [at for at, entry in enumerate(found) if entry is None]
            if missing and tier.alive:
                entries = await tier.answer(tier.guard.describe([keys[at] for at in missing]), ())
                for at, entry in zip(missing, entries, strict=False):
                    found[at] = entry
        return found

    async def _ask(
        self, tiers: Sequence[Tier], keys: Sequence[BlockKey], seconds: float
    ) -> dict[Tier, int]:
        """Returns the answers of `tiers` within `seconds`; stops once one tier has all `keys`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        tasks = {loop.create_task(tier.lookup(keys)): tier for tier in tiers}
        waiting = set(tasks)
        answers: dict[Tier, int] = {}
        while waiting and (left := until - loop.time()) > 0:
            done, waiting = await asyncio.wait(
                waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            answers.update((tasks[task], task.result()) for task in done)
            if any(answers[tasks[task]] == len(keys) for task in done):
                break
        late = loop.time() >= until and seconds >= self._patience_s
        for task in waiting:
            if late:
                tasks[task].note_slow()
            self._leave(task, tasks[task])
        return answers

    def _leave(self, task: asyncio.Task[int], tier: Tier) -> None:
        # The lookup continues, so that the tier marks the blocks as used.
        self._unanswered[task] = tier
        task.add_done_callback(lambda ended: self._unanswered.pop(ended, None))
        if sum(other is tier for other in self._unanswered.values()) > _MAX_UNANSWERED:
            tier.note_slow()
