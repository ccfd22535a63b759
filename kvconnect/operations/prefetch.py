"""The verb ``prefetch``: copies blocks to the fastest tier of a tiered store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvconnect.backend import Backend, StoredEntry
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.operations.choice import choose, token_reader
from kvconnect.operations.frame_reader import read_frames
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Saved
from kvconnect.operations.saving import save_missing
from kvconnect.operations.visit import described, listed, parts, visiting
from kvconnect.operations.which import Wanted


async def prefetch(url: str, wanted: Wanted, done: Saved) -> None:
    """Copies the `wanted` blocks of the tiered store of `url` to its fastest tier.

    A tier in a process's own memory is skipped: other processes cannot write to it. The beginnings
    of prompts are copied first. Blocks that the tier has are skipped, so a repeated call after an
    interruption copies the rest. Damaged blocks are left out.

    Args:
        url: the URL of the store.
        wanted: the blocks.
        done: the counts are added to it while blocks are copied.

    Raises:
        ConfigurationError: the store has no faster tier to copy to, or the tiers cannot list their
            blocks.
        BackendUnavailable: a tier fails.
        RetryLater: the tier accepts no more blocks.
        BadFrame: damaged blocks were left out; all others are copied.
    """
    async with visiting(url, "store") as store:
        target, sources = _tiers(url, store)
        done.opened = True
        chosen = await choose(listed(url, store), wanted, token_reader(url))
        done.set_missing(chosen)
        known = described(target, chosen.keys)
        left = {key: None async for key, entry in known if entry is None}
        done.present = len(chosen.keys) - len(left)
        bad: set[BlockKey] = set()
        async with Progress("prefetch", len(left), "blocks") as progress:
            for source in sources:
                async for batch in read_frames(source, _entries(source, tuple(left))):
                    bad |= {one.entry.key for one in batch if one.problem}
                    sound = [
                        one.entry.block(one.data) for one in batch if not (one.problem or one.gone)
                    ]
                    await save_missing(target, sound, done)
                    progress.advance(len(sound))
                    for block in sound:
                        del left[block.key]
        done.bad = len(bad & left.keys())
    done.complete = True
    if done.bad:
        raise BadFrame(f"{done.bad} bad blocks were left out; 'kvconnect verify' lists them")


def _tiers(url: str, store: GuardedBackend) -> tuple[Backend, Sequence[Backend]]:
    """Returns the tier to copy to, and the slower ones that blocks come from."""
    name = str(StoreUrl.parse(url))
    tiers = parts(store)
    # A tier in memory ends with its process: only a server can fill its own.
    lasting = [one for one in tiers.values() if one.capabilities.durable or one.capabilities.shared]
    if len(tiers) < 2:
        raise ConfigurationError(
            f"{name}: {next(iter(tiers))} has no faster tier; give a tiered: store"
        )
    if len(lasting) < 2:
        raise ConfigurationError(
            f"{name}: of {', '.join(tiers)} no two keep blocks outside of a process's memory; "
            "'kvconnect warm --server' fills the memory of a running server"
        )
    if not all(one.capabilities.enumerable for one in lasting):
        raise ConfigurationError(f"{name}: a tier cannot list what it holds")
    return lasting[0], lasting[1:]


async def _entries(source: Backend, keys: Sequence[BlockKey]) -> AsyncIterator[StoredEntry]:
    async for _, entry in described(source, keys):
        if entry is not None:
            yield entry
