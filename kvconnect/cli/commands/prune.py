"""The command ``kvconnect prune``: deletes blocks by age, use, size, model or salt."""

from __future__ import annotations

import argparse
import heapq
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from kvconnect.backend import Access, Backend, StoredEntry
from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.url import format_size, parse_size
from kvconnect.cli.command import add_json, add_url, tell, tell_unknown
from kvconnect.cli.options.selection import add_selection, require_match, selection_of
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.operations.progress import Progress
from kvconnect.operations.selection import Selection
from kvconnect.operations.visit import each_block, listed, visiting

_KEYS_PER_DELETE = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``prune``."""
    parser.description = (
        "Delete the blocks that fit all that is given; with --to-size only as many of "
        "them as must go: lowest priority first, then longest unused, and always the end of a "
        "prompt before its beginning. Pinned blocks stay. An engine that has the store open goes "
        "on."
    )
    add_url(parser)
    add_selection(parser)
    parser.add_argument(
        "--to-size", metavar="SIZE", help="until the store holds so much, as in 10GiB"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    add_json(parser)


@dataclass(slots=True)
class _Pruned:
    opened: bool = False
    matched: bool = False
    deleted: int = 0
    deleted_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    unknown: int = 0
    pinned_blocks: int = 0


@dataclass(slots=True)
class _Stored:
    """The fields of one block that pruning needs; a store may hold millions."""

    key: BlockKey
    parent: BlockKey | None
    nbytes: int
    priority: int
    used_at: float


@dataclass(slots=True)
class _Inventory:
    """The blocks of a store, divided into those that fit the selection and the others."""

    chosen: list[_Stored] = field(default_factory=list)
    nbytes: int = 0
    blocks: int = 0
    children: Counter[BlockKey] = field(default_factory=Counter)

    def add(self, entry: StoredEntry, *, chosen: bool) -> None:
        self.blocks += 1
        self.nbytes += entry.nbytes
        if entry.parent is not None:
            self.children[entry.parent] += 1
        if chosen:
            self.chosen.append(
                _Stored(entry.key, entry.parent, entry.nbytes, entry.priority, entry.used_at)
            )

    def leaves_first(self) -> Iterator[_Stored]:
        """Yields the chosen blocks, least valuable first, none before its stored children.

        A block with an unchosen child comes after all others.
        """
        by_key = {block.key: block for block in self.chosen}
        children = Counter({key: self.children[key] for key in by_key})
        leaves = [
            (block.priority, block.used_at, block.key)
            for block in self.chosen
            if not children[block.key]
        ]
        heapq.heapify(leaves)
        while leaves:
            block = by_key.pop(heapq.heappop(leaves)[2])
            yield block
            parent = None if block.parent is None else by_key.get(block.parent)
            if parent is not None:
                children[parent.key] -= 1
                if not children[parent.key]:
                    heapq.heappush(leaves, (parent.priority, parent.used_at, parent.key))
        yield from sorted(by_key.values(), key=lambda one: (one.priority, one.used_at))


def run(arguments: argparse.Namespace) -> None:
    """Deletes, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: no option chooses blocks to delete.
        NothingMatched: no block is of the model, salt, adapter or group that is named.
    """
    size = None
    if arguments.to_size is not None:
        zero = arguments.to_size.strip() in {"0", "0B"}
        size = 0 if zero else parse_size(arguments.to_size, field="--to-size")
    selection = selection_of(arguments)
    if size is None and selection.everything:
        raise ConfigurationError(
            "prune: nothing says what to delete; give --older-than, --unused-for, --to-size, "
            "--model, --salt, --lora or --group"
        )
    pruned = _Pruned()
    try:
        run_to_end(_prune(arguments, selection, size, pruned))
    finally:
        if pruned.opened:
            _report(arguments, pruned)
    require_match(selection, found=pruned.matched)


async def _prune(
    arguments: argparse.Namespace, selection: Selection, size: int | None, pruned: _Pruned
) -> None:
    access: Access = "read" if arguments.dry_run else "maintain"
    async with visiting(arguments.url, access) as store:
        chosen = listed(arguments.url, store)
        if size is not None and store.parts():
            raise ConfigurationError("--to-size: give the URL of the tier that it is about")
        pruned.opened = True
        for name, part in chosen.items():
            inventory = _Inventory()
            async with Progress(f"list {name}", 0, "blocks") as progress:
                async for entry in each_block(part, progress):
                    fits = selection.fits(entry)
                    pruned.pinned_blocks += fits and entry.pinned_until > 0
                    inventory.add(entry, chosen=fits and not entry.pinned_until)
                    pruned.unknown += selection.cannot_tell(entry)
            pruned.matched |= bool(inventory.chosen)
            pruned.kept += inventory.blocks
            pruned.kept_bytes += inventory.nbytes
            doomed = _doomed(inventory, size)
            with Progress(f"prune {name}", len(doomed), "blocks") as progress:
                await _delete(None if arguments.dry_run else part, doomed, pruned, progress)


async def _delete(
    store: Backend | None, doomed: Sequence[_Stored], pruned: _Pruned, progress: Progress
) -> None:
    for start in range(0, len(doomed), _KEYS_PER_DELETE):
        piece = doomed[start : start + _KEYS_PER_DELETE]
        if store is not None:
            await store.delete([block.key for block in piece])
        nbytes = sum(block.nbytes for block in piece)
        pruned.deleted += len(piece)
        pruned.deleted_bytes += nbytes
        pruned.kept -= len(piece)
        pruned.kept_bytes -= nbytes
        progress.advance(len(piece))


def _doomed(inventory: _Inventory, size: int | None) -> list[_Stored]:
    doomed: list[_Stored] = []
    left = inventory.nbytes
    for block in inventory.leaves_first():
        if size is not None and left <= size:
            break
        doomed.append(block)
        left -= block.nbytes
    return doomed


def _report(arguments: argparse.Namespace, pruned: _Pruned) -> None:
    if arguments.json:
        numbers = asdict(pruned) | {"dry_run": arguments.dry_run}
        del numbers["opened"], numbers["matched"]
        print(json.dumps(numbers), flush=True)
        return
    what = "would delete" if arguments.dry_run else "deleted"
    print(
        f"{what} {pruned.deleted} blocks, {format_size(pruned.deleted_bytes)}; "
        f"{pruned.kept} blocks, {format_size(pruned.kept_bytes)}, stay",
        flush=True,
    )
    if pruned.pinned_blocks:
        tell(f"{pruned.pinned_blocks} pinned blocks stay; 'drop' deletes them, too")
    tell_unknown(pruned.unknown)
