"""The blocks that a store lists, each once, also where a store lists them without end."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvconnect.backend import Backend, StoredEntry
from kvconnect.cli.progress import Progress
from kvconnect.errors import BackendUnavailable

__all__ = ["each_block"]

# A part of each key is enough to know it again, and as a number takes least memory.
_SHORT = 8
# A store may list a block twice when it is moved meanwhile. So many in a row are no news.
_MOST_REPEATS = 10_000


async def each_block(
    store: Backend, progress: Progress | None = None
) -> AsyncIterator[StoredEntry]:
    """What `store` lists; each block is counted by `progress` and yielded once.

    Takes some 100 bytes of memory per block.

    Raises:
        BackendUnavailable: the store fails, or lists the same blocks again and again.
    """
    seen: set[int] = set()
    repeats = 0
    async for entry in store.scan():
        short = int.from_bytes(entry.key[:_SHORT])
        if short not in seen:
            seen.add(short)
            repeats = 0
            if progress is not None:
                progress.advance(1)
            yield entry
        elif (repeats := repeats + 1) > max(_MOST_REPEATS, len(seen)):
            raise BackendUnavailable(
                f"the store's listing does not end: {len(seen)} blocks come again and again"
            )
