"""The verb ``import``: saves the blocks of an exported file to a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path

from kvconnect.backend import StoredBlock
from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.operations.archive import ArchiveReader, Manifest, file_key
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Saved
from kvconnect.operations.saving import save_missing
from kvconnect.operations.visit import visiting

_BATCH_BLOCKS = 256
_BATCH_NBYTES = 16 << 20
# Bytes kept of each block's checksum: enough to notice that the file has changed.
_SHORT = 16


async def import_file(
    url: str, path: Path, done: Saved, *, model: str | None = None, key_file: str | None = None
) -> None:
    """Saves the blocks of the file `path` to the store of `url`, which is made if needed.

    The file is read twice: first all of it is checked, then its blocks are saved, parents first. A
    changed file is refused before a block is saved. A change between the two readings is refused at
    the first block behind it. Repeating it after an interruption saves the rest. Memory is used for
    one batch of some 16 MiB, and 16 bytes per block.

    Args:
        url: the URL of the store.
        path: the path of the file.
        done: the counts, which grow while blocks are saved. Its `opened` is set once the whole file
            was found sound; before that no block is saved.
        model: the hexadecimal digits that the model of every block must begin with.
        key_file: the key file of the file's checksums.

    Raises:
        BadFrame: the file is damaged, cut short, changed, or made with another key.
        ConfigurationError: it cannot be opened, is of another model, or its blocks are too long for
            the store.
        BackendUnavailable: the store fails.
        RetryLater: the store accepts no more blocks.
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
            await save_missing(store, batch, done)
            progress.advance(len(batch))
    done.complete = True


def _check(path: Path, key: bytes, checksums: bytearray, progress: Progress) -> Manifest:
    with ArchiveReader(path, key) as reader:
        for _ in reader.blocks():
            checksums += reader.checksum_at_end[:_SHORT]
            progress.advance(1)
        if reader.manifest is None:
            raise BadFrame(f"{path}: ends too early; export it again")
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
            raise BadFrame(f"{path}: was changed after it had been checked; import it again")
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
