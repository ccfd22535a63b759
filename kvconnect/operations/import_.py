"""The verb ``import``: saves the blocks of an exported file to a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvconnect.backend import Backend, StoredBlock
from kvconnect.errors import BadFrame, ConfigurationError, RetryLater
from kvconnect.operations.archive import ArchiveReader, Manifest, file_key
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Result
from kvconnect.operations.visit import visiting

__all__ = ["Imported", "import_file"]

_BATCH_BLOCKS = 256
_BATCH_NBYTES = 16 << 20
# Of each block's checksum: enough to see that the file is the one that was checked.
_SHORT = 16


@dataclass(slots=True)
class Imported(Result):
    """The result of `import_file`: the blocks are those that were saved.

    `opened` is set once the whole file was found sound; before that nothing is saved.

    Attributes:
        present: blocks that were in the store already.
    """

    present: int = 0


async def import_file(
    url: str,
    path: Path,
    done: Imported,
    *,
    model: str | None = None,
    key_file: str | None = None,
) -> None:
    """Saves the blocks of the file `path` to the store of `url`, which is made if needed.

    The file is read twice: first all of it is checked, then its blocks are saved, parents first.
    A changed file is refused before a block is saved. A change between the two readings is refused
    at the first block behind it. Repeating it after an interruption saves the rest. Memory is used
    for one batch of some 16 MiB, and 16 bytes per block.

    Args:
        url: of the store.
        path: of the file.
        done: the counts are added to it while blocks are saved.
        model: the hexadecimal digits that the model of every block must begin with.
        key_file: of the file's checksums.

    Raises:
        BadFrame: the file is damaged, cut short, changed, or made with another key.
        ConfigurationError: it cannot be opened, is of another model, or its blocks are too long for
            the store.
        BackendUnavailable: the store fails.
        RetryLater: the store takes no more.
    """
    key = file_key(key_file)
    with Progress("check", 0, "blocks") as progress:
        checksums = bytearray()
        manifest = await asyncio.to_thread(_check, path, key, checksums, progress)
    _expect_model(path, manifest, model)
    done.opened = True
    async with (
        visiting(url, "store") as store,
        Progress("import", manifest.blocks, "blocks") as progress,
    ):
        async for batch in _batches(path, key, bytes(checksums)):
            await _save(store, batch, done)
            progress.advance(len(batch))
    done.complete = True


def _check(path: Path, key: bytes, checksums: bytearray, progress: Progress) -> Manifest:
    with ArchiveReader(path, key) as reader:
        for _ in reader.blocks():
            checksums += reader.checksum_at_end[:_SHORT]
            progress.advance(1)
        if reader.manifest is None:
            raise BadFrame(f"{path}: ends too early")
        return reader.manifest


def _expect_model(path: Path, manifest: Manifest, model: str | None) -> None:
    other = [tag for tag in manifest.models if model is not None and not tag.startswith(model)]
    if other:
        raise ConfigurationError(
            f"{path}: holds blocks of the model {other[0][:16]}…, not of {str(model)[:16]}…; leave "
            "the model out, or give a file of it"
        )


async def _batches(path: Path, key: bytes, checksums: bytes) -> AsyncIterator[list[StoredBlock]]:
    with ArchiveReader(path, key) as reader:
        blocks = _unchanged(path, reader, checksums)
        while batch := await asyncio.to_thread(_next_batch, blocks):
            yield batch


def _unchanged(path: Path, reader: ArchiveReader, checksums: bytes) -> Iterator[StoredBlock]:
    for number, block in enumerate(reader.blocks()):
        expected = checksums[number * _SHORT : (number + 1) * _SHORT]
        if reader.checksum_at_end[:_SHORT] != expected:
            raise BadFrame(f"{path}: was changed after it had been checked")
        yield block


def _next_batch(blocks: Iterator[StoredBlock]) -> list[StoredBlock]:
    batch: list[StoredBlock] = []
    nbytes = 0
    for block in islice(blocks, _BATCH_BLOCKS):
        batch.append(block)
        nbytes += block.data.numel()
        if nbytes >= _BATCH_NBYTES:
            break
    return batch


async def _save(store: Backend, batch: Sequence[StoredBlock], done: Imported) -> None:
    limit = store.capabilities.max_value_bytes
    if limit is not None and (long := max(block.data.numel() for block in batch)) > limit:
        raise ConfigurationError(
            f"the store takes values of up to {limit} bytes, and a block has {long}; give another"
        )
    known = await store.describe([block.key for block in batch])
    left = [block for block, entry in zip(batch, known, strict=True) if entry is None]
    done.present += len(batch) - len(left)
    while left:
        saving = asyncio.ensure_future(store.save(left))
        try:
            # The save continues after Ctrl-C: closing the store would wait for it anyway.
            await asyncio.wait({saving})
        finally:
            stored = await saving
            done.blocks += stored
            done.bytes += sum(block.data.numel() for block in left[:stored])
            done.tokens += sum(_tokens(block) for block in left[:stored])
        if not stored:
            raise RetryLater("the store takes no more blocks; give it more room, then go on")
        left = left[stored:]


def _tokens(block: StoredBlock) -> int:
    return 0 if block.group or block.tokens is None else len(block.tokens)
