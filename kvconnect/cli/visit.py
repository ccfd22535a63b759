"""Opening a store for a command: to look at what is in it, to delete from it, or to fill it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvconnect.backend import Access, Backend
from kvconnect.backends.guard.codecs import codec_names
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.registry import open_backend
from kvconnect.backends.url import StoreUrl, without_codec
from kvconnect.errors import BackendUnavailable, ConfigurationError

__all__ = ["Part", "add_url", "listed", "parts", "visit", "visiting"]

_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """A store that holds frames itself: the whole, or one tier of it."""

    name: str
    store: Backend


def add_url(parser: argparse.ArgumentParser, name: str = "url") -> None:
    """The positional argument that names a store."""
    parser.add_argument(
        name, metavar=name.upper(), help="of a store, as in disk:///var/cache/kv or redis://host"
    )


def visit(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end; Ctrl-C and SIGTERM cancel it, and it closes what it opened."""
    asyncio.run(work)


@asynccontextmanager
async def visiting(url: str, access: Access) -> AsyncIterator[GuardedBackend]:
    """The store of `url`, open for raw frames. What a running engine has stored stays as it is.

    Raises:
        ConfigurationError: a bad URL, or a store that nothing can be found in.
        BackendUnavailable: it cannot be reached.
    """
    parsed = StoreUrl.parse(url)
    codec_names(parsed.codec)  # left out below, but no other parameter may be mistyped either
    if access != "store" and parsed.scheme == "memory":
        raise ConfigurationError(
            f"{url}: a memory store belongs to the process that opened it; "
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


def parts(store: GuardedBackend) -> list[Part]:
    """The stores that hold frames: the tiers of a tiered one that answer, or `store` itself."""
    return [Part(name, part) for name, part in (store.parts() or {store.name: store}).items()]


def listed(url: str, store: GuardedBackend) -> list[Part]:
    """The parts that can list what they hold.

    Raises:
        ConfigurationError: there is none.
    """
    found = [part for part in parts(store) if part.store.capabilities.enumerable]
    if not found:
        raise ConfigurationError(f"{StoreUrl.parse(url)}: this store cannot list what it holds")
    return found
