"""The verbs ``pin`` and ``unpin``: keep blocks in a store, for a time or until unpinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvconnect.backend import Backend
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.operations.choice import ReadTokens, choose, token_reader
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Pinned
from kvconnect.operations.visit import listed, parts, visiting
from kvconnect.operations.which import Wanted

_KEYS_PER_PIN = 256


async def pin(url: str, wanted: Wanted, until: float | None, done: Pinned) -> None:
    """Pins the `wanted` blocks of the store of `url`, the beginnings of prompts first.

    Args:
        url: the URL of the store.
        wanted: the blocks.
        until: Unix seconds, ``inf``, or ``None`` to unpin; see `Backend.pin`.
        done: the counts are added to it while blocks are pinned.

    Raises:
        ConfigurationError: no part of the store has pins, or none can list its blocks.
        BackendUnavailable: the store fails.
    """
    read = token_reader(url)
    async with visiting(url, "maintain") as store:
        pinning = await _pinning(url, parts(store), until)
        listing = listed(url, store)
        done.opened = True
        chosen = await choose(listing, wanted, read)
        done.set_missing(chosen)
        counted: set[BlockKey] = set()
        async with Progress("pin", len(chosen.keys) * len(pinning), "blocks") as progress:
            for one in pinning.values():
                await _pin(one, chosen.keys, until, done, counted, read, progress)
    done.complete = True


async def _pinning(
    url: str, stores: Mapping[str, Backend], until: float | None
) -> dict[str, Backend]:
    """Returns by name those of `stores` that take pins now.

    Raises:
        ConfigurationError: there is none.
    """
    found: dict[str, Backend] = {}
    refusals: list[ConfigurationError] = []
    for name, one in stores.items():
        if one.capabilities.pins:
            try:
                await one.pin((), until)
                found[name] = one
            except ConfigurationError as error:  # a server's settings decide
                refusals.append(error)
    if found:
        return found
    if refusals:
        raise refusals[0]
    raise ConfigurationError(
        f"{StoreUrl.parse(url)}: {', '.join(stores)} cannot pin blocks; disk, memory and Redis "
        "stores can"
    )


async def _pin(
    store: Backend,
    keys: Sequence[BlockKey],
    until: float | None,
    done: Pinned,
    counted: set[BlockKey],
    read: ReadTokens,
    progress: Progress,
) -> None:
    full = False
    for start in range(0, len(keys), _KEYS_PER_PIN):
        piece = keys[start : start + _KEYS_PER_PIN]
        entries = await store.describe(piece)
        # Blocks after one without room are not pinned: they may be its children.
        answers = [False] * len(piece) if full else await store.pin(piece, until)
        for entry, pinned in zip(entries, answers, strict=True):
            if entry is None:
                continue
            if not pinned:
                done.refused += until is not None
                full |= until is not None
                continue
            done.blocks += 1
            done.bytes += entry.nbytes
            if entry.group == 0 and entry.key not in counted:
                counted.add(entry.key)
                tokens = read(entry)
                done.tokens += 0 if tokens is None else len(tokens)
        progress.advance(len(piece))
