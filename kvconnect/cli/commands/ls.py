"""The command ``kvconnect ls``: lists the blocks in a store."""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import AsyncIterator, Callable
from math import inf
from typing import Any

from kvconnect.backend import StoredEntry
from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.url import format_size
from kvconnect.cli.command import add_json, add_number, add_url, require_at_least_one
from kvconnect.cli.options.selection import add_selection, require_match, selection_of
from kvconnect.keys import KEY_NBYTES, salt_of
from kvconnect.operations.progress import Progress
from kvconnect.operations.selection import Selection
from kvconnect.operations.visit import each_block, listed, visiting

_SORT: dict[str, Callable[[StoredEntry], Any]] = {
    "age": lambda entry: entry.created_at,
    "used": lambda entry: entry.used_at,
    "bytes": lambda entry: -entry.nbytes,
    "priority": lambda entry: -entry.priority,
    "key": lambda entry: entry.key,
}
_UNITS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_COLUMNS = ("KEY", "BYTES", "AGE", "USED", "PRIO", "PINNED", "TOKENS", "GROUP", "MODEL", "SPACE")
_ROW = "{:<16}  {:>10}  {:>5}  {:>5}  {:>4}  {:>6}  {:>6}  {:>5}  {:<8}  {:<8}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``ls``."""
    parser.description = (
        "List the blocks in a store. A listing that is not sorted is printed as it is "
        "read, however long it is; it does not count as use of the blocks."
    )
    add_url(parser)
    parser.add_argument(
        "--sort",
        choices=sorted(_SORT),
        help="oldest, longest unused, largest or most important first",
    )
    add_number(parser, "--limit", "only the first so many")
    add_json(parser, "block")
    add_selection(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints the listing.

    Raises:
        NothingMatched: no block is of the model, salt, adapter or group that is named.
    """
    require_at_least_one(arguments, "limit")
    selection = selection_of(arguments)
    require_match(selection, found=run_to_end(_list(arguments, selection)))


async def _list(arguments: argparse.Namespace, selection: Selection) -> bool:
    """Prints the chosen blocks; returns whether there was one."""
    found = False
    show = _print_json if arguments.json else _print_row
    async with visiting(arguments.url, "read") as store:
        listed(arguments.url, store)
        if not arguments.json:
            print(_ROW.format(*_COLUMNS))
        async with Progress("ls", 0, "blocks", lines=True) as progress:
            entries = each_block(store, progress)
            async for entry in _chosen(entries, selection, arguments.sort, arguments.limit):
                show(entry)
                found = True
    return found


async def _chosen(
    entries: AsyncIterator[StoredEntry], selection: Selection, sort: str | None, limit: int | None
) -> AsyncIterator[StoredEntry]:
    if sort is None:
        left = limit
        async for entry in entries:
            if selection.fits(entry):
                yield entry
                if left is not None and (left := left - 1) == 0:
                    return
        return
    value = _SORT[sort]
    kept: list[StoredEntry] = []
    async for entry in entries:
        if selection.fits(entry):
            kept.append(entry)
            if limit is not None and len(kept) >= 2 * limit + 1024:
                kept = heapq.nsmallest(limit, kept, key=value)
    for entry in sorted(kept, key=value)[:limit]:
        yield entry


def _print_row(entry: StoredEntry) -> None:
    now = time.time()
    tokens = "" if entry.tokens is None else str(len(entry.tokens))
    row = _ROW.format(
        entry.key.hex()[:16],
        format_size(entry.nbytes),
        _ago(now - entry.created_at),
        _ago(now - entry.used_at),
        entry.priority,
        _pinned(entry, now),
        tokens,
        entry.group,
        entry.model.hex()[:8],
        entry.namespace.hex()[:8],
    )
    print(row.rstrip())


def _print_json(entry: StoredEntry) -> None:
    print(json.dumps(as_json(entry)))


def as_json(entry: StoredEntry) -> dict[str, object]:
    """Returns `entry` as JSON, without its tokens, which are a prompt; ``salt`` is the `salt_tag`.

    An unlimited pin has no ``pinned_until``. ``expires_at`` is the block's own end, if it has one.
    """
    salt = salt_of(entry.namespace)
    return {
        "key": entry.key.hex(),
        "bytes": entry.nbytes,
        "created_at": entry.created_at,
        "used_at": entry.used_at,
        "priority": entry.priority,
        "pinned": entry.pinned_until > 0,
        "pinned_until": entry.pinned_until if 0 < entry.pinned_until < inf else None,
        "expires_at": entry.expires_at,
        "parent": None if entry.parent is None else entry.parent.hex(),
        "num_tokens": None if entry.tokens is None else len(entry.tokens),
        "group": entry.group,
        "model": entry.model.hex(),
        "namespace": entry.namespace[:KEY_NBYTES].hex(),
        "salt": None if salt is None else salt.hex(),
    }


def _pinned(entry: StoredEntry, now: float) -> str:
    if entry.pinned_until == inf:
        return "yes"
    return _ago(entry.pinned_until - now) if entry.pinned_until else ""


def _ago(seconds: float) -> str:
    for factor, unit in _UNITS:
        if seconds >= factor:
            return f"{int(seconds // factor)}{unit}"
    return "now"
