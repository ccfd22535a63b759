"""A store of your own: four methods. This one keeps each block in a file of its own, with aiofiles.

Usage: ``python examples/custom_backend.py [MODEL_DIR]``

Two engines answer one prompt, one after the other. The second one loads the first one's blocks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import aiofiles
import aiofiles.os
from torch import Tensor

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.backend import Access, Backend, Capabilities, StoredBlock
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout


class FolderBackend(Backend):
    """A file per block, named by its key, in a folder of one process at a time."""

    # What was saved is there after a kill -9, and in the next process.
    capabilities = Capabilities(durable=True)

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def _path(self, key: BlockKey) -> Path:
        return self._folder / key.hex()

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Makes the folder, and removes the unfinished files of a process that was killed."""
        await aiofiles.os.makedirs(self._folder, exist_ok=True)
        for name in await aiofiles.os.listdir(self._folder):
            if name.endswith(".tmp"):
                await aiofiles.os.remove(self._folder / name)

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Counts the leading keys whose files exist."""
        for index, key in enumerate(keys):
            if not await aiofiles.os.path.exists(self._path(key)):
                return index
        return len(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Reads straight into the buffers. A file of another length is a miss."""
        for index, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            try:
                if await aiofiles.os.path.getsize(self._path(key)) != len(buffer):
                    return index
                async with aiofiles.open(self._path(key), "rb") as file:
                    if await file.readinto(buffer.numpy().data) != len(buffer):
                        return index
            except FileNotFoundError:
                return index
        return len(keys)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Writes a file, then renames it, so that a block is stored whole or not at all."""
        for block in blocks:
            temporary = self._folder / f"{uuid4()}.tmp"
            try:
                async with aiofiles.open(temporary, "wb") as file:
                    await file.write(block.data.numpy().data)
                await aiofiles.os.replace(temporary, self._path(block.key))
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
        return len(blocks)

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Removes the files that exist."""
        for key in keys:
            with suppress(FileNotFoundError):
                await aiofiles.os.remove(self._path(key))


PROMPT = "A store needs four methods: lookup, load, save and delete. Everything else is optional. "


def main() -> None:
    """Answer one prompt with two engines, one after the other, on one folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", nargs="?", metavar="MODEL_DIR", help="default: a small random one")
    with tempfile.TemporaryDirectory() as temporary:
        model = parser.parse_args().model
        if model is None:
            print("The model is random: its answers make no sense.")
            model = make_model(Path(temporary, "model"))
        folder = Path(temporary, "blocks")
        outputs = []
        for title in ("first engine ", "second engine"):
            # This model computes a prompt faster than files are read, so the engine has to wait.
            waits = {"lookup_timeout_ms": 1000, "overlap_loads": False}
            store = KvCacheConnectorConfig(backend=FolderBackend(folder), **waits)
            with LLM(model, kv_cache=KvCacheConfig(max_tokens=4096), connector=store) as llm:
                output = llm.generate(PROMPT * 4, SamplingParams(max_tokens=16))[0]
            found = f"{output.reused_store_tokens} from the folder"
            counts = f"{output.prompt_tokens} prompt tokens, {found}"
            print(f"{title}: {counts}, {output.computed_tokens} computed")
            outputs.append(output)
    if outputs[0].output_token_ids != outputs[1].output_token_ids:
        sys.exit("The answers differ.")
    if not outputs[1].reused_store_tokens:
        sys.exit("Nothing was reused.")


if __name__ == "__main__":
    main()
