"""Which leading blocks the tiers of a tiered store have between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvconnect.backends.tiered.tier import Tier
from kvconnect.keys import BlockKey

__all__ = ["TierLookups"]

# Lookups of one tier that nobody waits for any more; a tier with more of them is slow.
_MAX_UNANSWERED = 32


class TierLookups:
    """Asks all tiers at once, and waits for none beyond its patience.

    Args:
        tiers: in order.
        patience_s: what a lookup waits for a tier.
    """

    def __init__(self, tiers: Sequence[Tier], patience_s: float) -> None:
        self._tiers = tiers
        self._patience_s = patience_s
        self._unanswered: dict[asyncio.Task[int], Tier] = {}

    async def count(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are present, each in any tier.

        Ends as soon as one tier has all that is left, and at the latest after twice the patience:
        where tiers take turns within the prefix, each turn asks them again.
        """
        loop = asyncio.get_running_loop()
        start, patience = loop.time(), self._patience_s
        found = 0
        ends: dict[Tier, int] = {}
        while found < len(keys):
            # Of a tier whose run ended here it is known that it does not have the next one.
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
        """Give up what nobody waits for."""
        for task in self._unanswered:
            task.cancel()

    async def _ask(
        self, tiers: Sequence[Tier], keys: Sequence[BlockKey], seconds: float
    ) -> dict[Tier, int]:
        """What each of `tiers` answers within `seconds`, or by the time one has all of `keys`."""
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
        # It goes on: the tier learns that the blocks were used.
        self._unanswered[task] = tier
        task.add_done_callback(lambda ended: self._unanswered.pop(ended, None))
        if sum(other is tier for other in self._unanswered.values()) > _MAX_UNANSWERED:
            tier.note_slow()
