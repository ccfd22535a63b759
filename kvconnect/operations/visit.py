"""Opens a store for a verb: to read its blocks, to delete some, or to fill it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from kvconnect.backend import Access, Backend
from kvconnect.backends.guard.codecs import codec_names
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.registry import open_backend
from kvconnect.backends.url import StoreUrl, without_codec
from kvconnect.errors import BackendUnavailable, ConfigurationError

_DEADLINE_S = 60.0


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
