"""The verb ``drop``: deletes blocks from every part of a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from kvconnect.backend import Backend
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.errors import BackendUnavailable
from kvconnect.operations.choice import Chosen, ReadTokens, choose, token_reader
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Result
from kvconnect.operations.visit import listed, parts, visiting
from kvconnect.operations.which import Wanted

_KEYS_PER_DELETE = 256
_LONGEST_PAUSE_S = 0.5


async def drop(
    url: str,
    wanted: Wanted,
    done: Result,
    *,
    dry_run: bool = False,
    before: Callable[[], None] | None = None,
) -> None:
    """Deletes the `wanted` blocks of the store of `url`, the ends of prompts first.

    Pinned blocks are deleted, too. A repeated call after an interruption deletes the rest. Then the
    bytes of blocks that were dropped earlier are overwritten, too; see `Backend.scrub`.

    Args:
        url: the URL of the store.
        wanted: the blocks.
        done: the counts are added to it while blocks are deleted.
        dry_run: only count.
        before: called on another thread once the store is open, before its blocks are listed; not
            with `dry_run`.

    Raises:
        ConfigurationError: no part of the store can list its blocks.
        BackendUnavailable: the store fails; or one part of it does not answer or cannot list its
            blocks. The blocks of the other parts are deleted then.
    """
    read = token_reader(url)
    async with visiting(url, "read" if dry_run else "maintain") as store:
        listing = listed(url, store)
        done.opened = True
        if before is not None and not dry_run:
            await asyncio.to_thread(before)
        chosen = await choose(listing, wanted, read)
        done.set_missing(chosen)
        stores = parts(store)
        await _delete(stores, chosen, read, done, dry_run=dry_run)
        await _expect_all(store, stores)
    done.complete = True


async def _delete(
    stores: Mapping[str, Backend], chosen: Chosen, read: ReadTokens, done: Result, *, dry_run: bool
) -> None:
    keys = chosen.keys[::-1]
    async with Progress("drop", len(keys), "blocks") as progress:
        for start in range(0, len(keys), _KEYS_PER_DELETE):
            piece = keys[start : start + _KEYS_PER_DELETE]
            tokens: dict[bytes, int] = {}
            for store in stores.values():
                entries = [one for one in await store.describe(piece) if one is not None]
                if not dry_run:
                    await store.delete(piece)
                done.blocks += len(entries)
                done.bytes += sum(entry.nbytes for entry in entries)
                for entry in entries:
                    if entry.group == 0 and (known := read(entry)) is not None:
                        tokens[entry.key] = len(known)
            done.tokens += sum(tokens.values())
            progress.advance(len(piece))
    if not dry_run:
        async with Progress("scrub", 0, "parts") as progress:
            for store in stores.values():
                begun = time.monotonic()
                while await store.scrub():
                    progress.advance(1)
                    # A pause as long as the call took, so that other callers reach the store.
                    await asyncio.sleep(min(time.monotonic() - begun, _LONGEST_PAUSE_S))
                    begun = time.monotonic()


async def _expect_all(store: GuardedBackend, answering: Mapping[str, Backend]) -> None:
    numbers = await store.stats()
    silent = [
        name.removesuffix(".alive")
        for name, alive in numbers.items()
        if name.endswith(".alive") and not alive
    ]
    if silent:
        raise BackendUnavailable(
            f"{', '.join(silent)}: does not answer; what is stored there stays: drop it again once "
            "it answers"
        )
    unlisted = [name for name, part in answering.items() if not part.capabilities.enumerable]
    if unlisted:
        raise BackendUnavailable(
            f"{', '.join(unlisted)}: cannot list its blocks; what is only there stays"
        )
