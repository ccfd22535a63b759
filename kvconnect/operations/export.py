"""The verb ``export``: writes blocks of a store to one file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvconnect.backend import Backend, StoredEntry
from kvconnect.errors import BadFrame, RetryLater
from kvconnect.keys import BlockKey
from kvconnect.operations.archive import ArchiveWriter, file_key
from kvconnect.operations.choice import choose, token_reader
from kvconnect.operations.frame_reader import ReadFrame, read_frames
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Result
from kvconnect.operations.visit import listed, visiting
from kvconnect.operations.wanted import Wanted

__all__ = ["Exported", "export"]

_KEYS_PER_DESCRIBE = 256


@dataclass(slots=True)
class Exported(Result):
    """The result of `export`: the blocks and tokens are those that the file holds.

    The bytes are of the frames written now.

    Attributes:
        resumed: the blocks that an earlier, interrupted export had written.
        bad: blocks left out since they are damaged.
        gone: blocks that the store dropped meanwhile.
    """

    resumed: int = 0
    bad: int = 0
    gone: int = 0


async def export(
    url: str, wanted: Wanted, path: Path, done: Exported, *, key_file: str | None = None
) -> None:
    """Writes the `wanted` blocks of the store of `url` to the file `path`, parents first.

    The file is ``PATH.part`` until it is complete and durable. After an interruption it is
    continued if all of its blocks are still wanted. Memory is used for two batches of some 16 MiB,
    and some 500 bytes per block. Blocks do not count as used. If nothing that is wanted is stored,
    no file is made.

    Raises:
        ConfigurationError: the store cannot list its blocks, or another process writes the file.
        BackendUnavailable: the store fails.
        BadFrame: the file is complete but for damaged blocks.
        OSError: the file cannot be written.
    """
    key = file_key(key_file)
    async with visiting(url, "read") as store:
        stores = listed(url, store)
        done.opened = True
        chosen = await choose(stores, wanted, token_reader(url))
        done.set_missing(chosen)
        if not chosen.keys:
            done.complete = True
            return
        part = path.with_name(path.name + ".part")
        await _write(store, chosen.keys, part, path, key, done)
    done.complete = True
    if done.bad:
        raise BadFrame(f"{done.bad} bad blocks were left out; 'kvconnect verify' lists them")


async def _write(
    store: Backend,
    keys: Sequence[BlockKey],
    part: Path,
    path: Path,
    key: bytes,
    done: Exported,
) -> None:
    writer = await asyncio.to_thread(ArchiveWriter, part, key)
    try:
        if not writer.keys <= set(keys):
            writer.restart()
        done.resumed = done.blocks = len(writer.keys)
        left = [one for one in keys if one not in writer.keys]
        async with Progress("export", len(left), "blocks") as progress:
            async for batch in read_frames(store, _entries(store, left, done)):
                writing = asyncio.ensure_future(asyncio.to_thread(_add, writer, batch, done))
                try:
                    await asyncio.wait({writing})
                finally:
                    await writing  # also after Ctrl-C: the thread uses the batch
                progress.advance(len(batch))
        if not writer.keys:
            await asyncio.to_thread(part.unlink)
            raise RetryLater("all wanted blocks were dropped or are bad; no file is made")
        manifest = await asyncio.to_thread(writer.finish, path)
        done.tokens = sum(one.tokens for one in manifest.models.values())
    finally:
        writer.close()


def _add(writer: ArchiveWriter, batch: Sequence[ReadFrame], done: Exported) -> None:
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
    for start in range(0, len(keys), _KEYS_PER_DESCRIBE):
        for entry in await store.describe(keys[start : start + _KEYS_PER_DESCRIBE]):
            if entry is None:
                done.gone += 1
            else:
                yield entry
