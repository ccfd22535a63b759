"""The verb ``export``: writes blocks of a store to one file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvconnect.backend import Backend, StoredEntry
from kvconnect.errors import BadFrame, RetryLater
from kvconnect.keys import BlockKey
from kvconnect.operations.archive import ArchiveStream, ArchiveWriter, file_key, part_of
from kvconnect.operations.choice import choose, token_reader
from kvconnect.operations.frame_reader import ReadFrame, read_frames
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Exported
from kvconnect.operations.visit import described, listed, visiting
from kvconnect.operations.which import Wanted

SHORT_KEY_NBYTES = 8
"""The first bytes of a key stand for it in a list of those that are there already."""


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """A stream that takes the bytes of a file, in place of a path.

    Attributes:
        file: takes them, on another thread; it need not be seekable.
        skip: yields beginnings of keys, `SHORT_KEY_NBYTES` each: blocks that are not written.
        begun: called once the blocks are known, before the first byte, with their number.
    """

    file: BinaryIO
    skip: Iterable[bytes]
    begun: Callable[[int], None]


async def export(
    url: str, wanted: Wanted, path: Path | Sink, done: Exported, *, key_file: str | None = None
) -> None:
    """Writes the `wanted` blocks of the store of `url` to the file `path`, parents first.

    The file is ``PATH.part`` until it is complete and durable. After an interruption it is
    continued if all of its blocks are still wanted. Memory is used for two batches of some 16 MiB,
    and some 500 bytes per block. Blocks do not count as used. If nothing that is wanted is stored,
    no file is made.

    Raises:
        ConfigurationError: the store cannot list its blocks, another process writes the file, or
            `path` is a directory.
        BackendUnavailable: the store fails.
        BadFrame: damaged blocks were left out; the file is complete otherwise.
        OSError: the file cannot be written.
    """
    key = file_key(key_file)
    if not isinstance(path, Sink):
        part = part_of(path)
    async with visiting(url, "read") as store:
        stores = listed(url, store)
        done.opened = True
        chosen = await choose(stores, wanted, token_reader(url))
        done.set_missing(chosen)
        if isinstance(path, Sink):
            await _send(store, chosen.keys, path, key, done)
            return
        if not chosen.keys:
            done.complete = True
            return
        await _write(store, chosen.keys, part, path, key, done)
    done.complete = True
    if done.bad:
        raise BadFrame(f"{done.bad} bad blocks were left out; 'kvconnect verify' lists them")


async def _write(
    store: Backend, keys: Sequence[BlockKey], part: Path, path: Path, key: bytes, done: Exported
) -> None:
    writer = await asyncio.to_thread(ArchiveWriter, part, key)
    try:
        if not writer.keys <= set(keys):
            writer.restart()
        done.resumed = done.blocks = len(writer.keys)
        left = [one for one in keys if one not in writer.keys]
        await _write_each(store, left, writer, done)
        if not writer.keys:
            await asyncio.to_thread(part.unlink)
            raise RetryLater("all wanted blocks were dropped or are bad; no file is made")
        manifest = await asyncio.to_thread(writer.finish, path)
        done.tokens = sum(one.tokens for one in manifest.models.values())
    finally:
        writer.close()


async def _send(
    store: Backend, keys: Sequence[BlockKey], sink: Sink, key: bytes, done: Exported
) -> None:
    skipped = await asyncio.to_thread(
        {one[:SHORT_KEY_NBYTES] for one in keys}.intersection, sink.skip
    )
    left = [one for one in keys if one[:SHORT_KEY_NBYTES] not in skipped]
    done.resumed = len(keys) - len(left)
    sink.begun(len(left))
    writer = await asyncio.to_thread(ArchiveStream, sink.file, key)
    await _write_each(store, left, writer, done)
    manifest = await asyncio.to_thread(writer.end)
    done.tokens = sum(one.tokens for one in manifest.models.values())
    done.complete = True


async def _write_each(
    store: Backend, keys: Sequence[BlockKey], writer: ArchiveStream, done: Exported
) -> None:
    async with Progress("export", len(keys), "blocks") as progress:
        async for batch in read_frames(store, _entries(store, keys, done)):
            writing = asyncio.ensure_future(asyncio.to_thread(_add, writer, batch, done))
            try:
                await asyncio.wait({writing})
            finally:
                await writing  # also after Ctrl-C: the thread uses the batch
            progress.advance(len(batch))


def _add(writer: ArchiveStream, batch: Sequence[ReadFrame], done: Exported) -> None:
    for one in batch:
        done.bad += bool(one.problem)
        done.gone += one.gone
        if not one.problem and not one.gone:
            writer.add(one.entry.block(one.data))
            done.blocks += 1
            done.bytes += one.data.numel()
    writer.flush()


async def _entries(
    store: Backend, keys: Sequence[BlockKey], done: Exported
) -> AsyncIterator[StoredEntry]:
    async for _, entry in described(store, keys):
        if entry is None:
            done.gone += 1
        else:
            yield entry
