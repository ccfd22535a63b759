"""Opens a store for a verb: to read its blocks, to delete some, or to fill it; lists blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from kvconnect.backend import Access, Backend, StoredEntry
from kvconnect.backends.guard.codecs import codec_names
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.registry import open_backend
from kvconnect.backends.url import StoreUrl, without_codec
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.operations.progress import Progress

_DEADLINE_S = 60.0
# A part of each key identifies the block, and takes least memory as an integer.
_SHORT = 8
# A store may list a block twice if it moves meanwhile; so many repetitions in a row are an error.
_MOST_REPEATS = 10_000

_KEYS_PER_DESCRIBE = 256


@asynccontextmanager
async def visiting(url: str, access: Access) -> AsyncIterator[GuardedBackend]:
    """Opens the store of `url` for raw frames; blocks of a running engine stay unchanged.

    Raises:
        ConfigurationError: a bad URL, or a store in the memory of its own process.
        BackendUnavailable: it cannot be reached.
    """
    parsed = StoreUrl.parse(url)
    codec_names(parsed.codec)  # left out below, but checked like every other parameter
    if access != "store" and parsed.scheme == "memory":
        raise ConfigurationError(
            f"{parsed}: a memory store belongs to the process that opened it; "
            f"from outside there is nothing in it"
        )
    backend = open_backend(without_codec(url), deadline_s=_DEADLINE_S, raw=True)
    await backend.open([], access)
    try:
        if access == "maintain" and (await backend.stats()).get("read_only"):
            raise BackendUnavailable(f"{parsed}: cannot be written to")
        yield backend
    finally:
        await backend.close()


def parts(store: GuardedBackend) -> Mapping[str, Backend]:
    """Returns by name the stores that hold frames: the answering tiers of a store, or `store`."""
    return store.parts() or {store.name: store}


def listed(url: str, store: GuardedBackend) -> dict[str, Backend]:
    """Returns the parts that can list their blocks.

    Raises:
        ConfigurationError: no part can.
    """
    found = {name: part for name, part in parts(store).items() if part.capabilities.enumerable}
    if not found:
        raise ConfigurationError(
            f"{StoreUrl.parse(url)}: this store cannot list its blocks; "
            "only lookups by key are possible"
        )
    return found


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
