"""The command ``kvconnect copy``: copies the blocks of one store to another."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvconnect.backend import StoredBlock, StoredEntry
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.url import StoreUrl, format_size
from kvconnect.cli.command import add_json, add_url, tell
from kvconnect.cli.options.selection import add_selection, require_match, selection_of
from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.operations.progress import Progress
from kvconnect.operations.saving import save_all
from kvconnect.operations.selection import Selection
from kvconnect.operations.visit import each_block, listed, visiting

if TYPE_CHECKING:
    from kvconnect.operations.frame_reader import ReadFrame

_KEYS_PER_LOOKUP = 256
# A part of each key identifies the block, and takes less memory.
_SHORT = 12


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``copy``."""
    parser.description = (
        "Copy the blocks of one store to another, with all that is known of them. What "
        "is there already is skipped, so a copy that was interrupted goes on where it was. Every "
        "block is checked on its way: a bad one is left behind, and the exit code is 1."
    )
    add_url(parser, "source")
    add_url(parser, "target")
    add_selection(parser)
    add_json(parser)


@dataclass(slots=True)
class _Copied:
    opened: bool = False
    copied: int = 0
    bytes: int = 0
    skipped: int = 0
    bad: int = 0
    gone: int = 0
    complete: bool = False


def run(arguments: argparse.Namespace) -> None:
    """Copies, and prints the result, also after Ctrl-C.

    Raises:
        ConfigurationError: source and target are the same.
        RetryLater: the target accepts no more blocks.
        NothingMatched: no block is of the model, salt, adapter or group that is named.
        BadFrame: damaged blocks were not copied.
    """
    if arguments.source == arguments.target:
        target = StoreUrl.parse(arguments.target)
        raise ConfigurationError(f"TARGET {target}: is SOURCE; give another store")
    selection = selection_of(arguments)
    done = _Copied()
    start = time.monotonic()
    try:
        run_to_end(_copy(arguments, selection, done))
        done.complete = True
    finally:
        if done.opened:
            _report(arguments, done, time.monotonic() - start)
    require_match(selection, found=done.copied + done.skipped + done.bad + done.gone > 0)
    if done.bad:
        raise BadFrame(f"{done.bad} bad blocks were left behind; 'kvconnect verify' lists them")


async def _copy(arguments: argparse.Namespace, selection: Selection, done: _Copied) -> None:
    from kvconnect.operations.frame_reader import read_frames

    async with (
        visiting(arguments.source, "read") as source,
        visiting(arguments.target, "store") as target,
    ):
        listed(arguments.source, source)
        done.opened = True
        keys, nbytes = await _survey(source, selection)
        await _warn_if_too_small(target, nbytes)
        async with Progress("copy", nbytes, "bytes") as progress:
            entries = parents_first(_selected(source, selection), keys)
            missing = _missing(target, entries, done, progress)
            async for batch in read_frames(source, missing):
                await _write(target, batch, done)
                progress.advance(sum(one.entry.nbytes for one in batch))


async def _survey(source: GuardedBackend, selection: Selection) -> tuple[set[bytes], int]:
    keys: set[bytes] = set()
    nbytes = 0
    async with Progress("list the source", 0, "blocks") as progress:
        async for entry in _selected(source, selection, progress):
            keys.add(entry.key[:_SHORT])
            nbytes += entry.nbytes
    return keys, nbytes


async def _selected(
    source: GuardedBackend, selection: Selection, progress: Progress | None = None
) -> AsyncIterator[StoredEntry]:
    async for entry in each_block(source, progress):
        if selection.fits(entry):
            yield entry


async def parents_first(
    entries: AsyncIterator[StoredEntry], keys: set[bytes]
) -> AsyncIterator[StoredEntry]:
    """Yields `entries`, each after its parent if that is among `keys`, the beginnings of keys.

    An interrupted copy then leaves the beginnings of prompts, which can be used. Only entries that
    precede their parent are held in memory. `keys` is emptied.
    """
    waiting: dict[bytes, list[StoredEntry]] = {}
    async for listed_entry in entries:
        ready = [listed_entry]
        while ready:
            entry = ready.pop()
            parent = None if entry.parent is None else entry.parent[:_SHORT]
            short = entry.key[:_SHORT]
            if parent is not None and parent in keys and parent != short:
                waiting.setdefault(parent, []).append(entry)
                continue
            keys.discard(short)
            yield entry
            ready += waiting.pop(short, [])
    # Their parents were deleted between the two listings.
    for orphans in waiting.values():
        for entry in orphans:
            yield entry


async def _missing(
    target: GuardedBackend, entries: AsyncIterator[StoredEntry], done: _Copied, progress: Progress
) -> AsyncIterator[StoredEntry]:
    """Yields the entries that `target` may lack, according to lookups of many keys at once."""
    batch: list[StoredEntry] = []
    async for entry in entries:
        batch.append(entry)
        if len(batch) == _KEYS_PER_LOOKUP:
            for left in await _without_present(target, batch, done, progress):
                yield left
            batch = []
    for left in await _without_present(target, batch, done, progress):
        yield left


async def _without_present(
    target: GuardedBackend, entries: Sequence[StoredEntry], done: _Copied, progress: Progress
) -> list[StoredEntry]:
    left: list[StoredEntry] = []
    rest = list(entries)
    while rest:
        present = await target.lookup([entry.key for entry in rest])
        done.skipped += present
        progress.advance(sum(entry.nbytes for entry in rest[:present]))
        # A lookup finds the first absent key only, and another lookup the next one. If most are
        # absent, that would be a lookup for each, so the rest is copied without lookups.
        if present == 0 and left:
            return left + rest
        left += rest[present : present + 1]
        rest = rest[present + 1 :]
    return left


async def _write(target: GuardedBackend, batch: Sequence[ReadFrame], done: _Copied) -> None:
    done.bad += sum(bool(one.problem) for one in batch)
    done.gone += sum(one.gone for one in batch)
    blocks = [one.entry.block(one.data) for one in batch if not one.problem and not one.gone]

    def count(saved: Sequence[StoredBlock]) -> None:
        done.copied += len(saved)
        done.bytes += sum(block.data.numel() for block in saved)

    await save_all(target, blocks, count, "TARGET")


async def _warn_if_too_small(target: GuardedBackend, nbytes: int) -> None:
    capacity = (await target.stats()).get("capacity")
    if capacity and capacity < nbytes:
        tell(
            f"SOURCE holds {format_size(nbytes)}, TARGET has room for "
            f"{format_size(int(capacity))}: it will drop what was copied first"
        )


def _report(arguments: argparse.Namespace, done: _Copied, seconds: float) -> None:
    rate = done.bytes / max(seconds, 1e-9)
    if arguments.json:
        numbers = asdict(done) | {"elapsed_s": seconds, "bytes_per_s": rate}
        del numbers["opened"]
        print(json.dumps(numbers), flush=True)
        return
    notes = [f"{done.skipped} were there already"]
    if done.bad:
        notes.append(f"{done.bad} are bad")
    if done.gone:
        notes.append(f"{done.gone} were dropped meanwhile")
    if not done.complete:
        notes.append("not complete: the same command goes on")
    size, speed = format_size(done.bytes), format_size(int(rate))
    print(f"copied {done.copied} blocks, {size}, at {speed}/s; {'; '.join(notes)}", flush=True)
