"""Lists a store in steps of many entries, each step one call within the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from kvconnect.backend import StoredEntry
from kvconnect.backends.guard.answers import is_entry
from kvconnect.backends.guard.calls import Calls, Wanted, mapped
from kvconnect.errors import BackendUnavailable, RetryLater

# A call of its own for each entry costs more than the entry. A reader of a few entries does not
# wait for many: each step has twice as many as the one before.
_FIRST_ENTRIES = 4
_MOST_ENTRIES = 256
_STEP_S = 0.02


async def scanned(
    calls: Calls, scan: Callable[[], AsyncIterator[StoredEntry]], name: str
) -> AsyncIterator[StoredEntry]:
    """Yields the entries of `scan`, of the store `name`, each checked.

    If a step fails, the entries that it brought come before the error.

    Raises:
        BackendTimeout: a step was not done in time.
        BackendUnavailable: the store failed, or yielded what is no entry.
    """
    with mapped(name, "scan"):
        listing = aiter(scan())
    loop = asyncio.get_running_loop()
    taken: list[StoredEntry] = []
    failure: RetryLater | None = None
    most = _FIRST_ENTRIES

    async def step(_: Wanted) -> bool:
        end = loop.time() + _STEP_S
        while (entry := await anext(listing, None)) is not None:
            if not is_entry(entry):
                raise BackendUnavailable(f"{name}: scan answered {entry!r:.200}")
            taken.append(entry)
            if len(taken) == most or loop.time() >= end:
                return True
        return False

    more = True
    while more:
        try:
            more = await calls.run("scan", step)
        except RetryLater as error:
            more, failure = False, error
        found, taken = taken, []
        most = min(2 * most, _MOST_ENTRIES)
        for entry in found:
            yield entry
    if failure is not None:
        raise failure
