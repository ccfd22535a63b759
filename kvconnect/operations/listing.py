"""Lists the blocks of a store: all, each once, or those of given keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvconnect.backend import Backend, StoredEntry
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey
from kvconnect.operations.progress import Progress

# A part of each key identifies the block, and takes least memory as an integer.
_SHORT = 8
# A store may list a block twice if it moves meanwhile; so many repetitions in a row are an error.
_MOST_REPEATS = 10_000

_KEYS_PER_DESCRIBE = 256


async def each_block(
    store: Backend, progress: Progress | None = None
) -> AsyncIterator[StoredEntry]:
    """Yields the entries of `store`, each once; `progress` counts them.

    It takes some 100 bytes of memory per block.

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


async def described(
    store: Backend, keys: Sequence[BlockKey]
) -> AsyncIterator[tuple[BlockKey, StoredEntry | None]]:
    """Yields each of `keys` with the entry of its block, or ``None`` if `store` does not have it.

    Raises:
        BackendUnavailable: the store fails.
    """
    for start in range(0, len(keys), _KEYS_PER_DESCRIBE):
        piece = keys[start : start + _KEYS_PER_DESCRIBE]
        for pair in zip(piece, await store.describe(piece), strict=True):
            yield pair
