"""The files of `kv_connector.py`, one for each block and rank, and its messages about blocks."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from kvconnect.keys import BlockKey

CACHE_FOLDER = "CONNECTOR_CACHE_FOLDER"
"""The environment variable that names the folder; default: ``./connector_cache``."""


@dataclass(frozen=True)
class BlockTransfer:
    """A block to load or save: its key, its id, its request, and its first token.

    It is the same for all ranks; each rank names its own file.
    """

    key: BlockKey
    block_id: int
    request_id: int
    first_token: int


@dataclass
class PersistentKvCacheConnectorMetadata:
    """The loads and saves of one step."""

    load: list[BlockTransfer] = field(default_factory=list)
    save: list[BlockTransfer] = field(default_factory=list)


def folder() -> Path:
    """Returns the folder of all files."""
    return Path(os.environ.get(CACHE_FOLDER, "connector_cache"))


def file_of(share: BlockKey) -> Path:
    """Returns the file of a rank's share of a block, by its store key."""
    return folder() / f"{share.hex()}.safetensors"


def _digest(file: Path, block: Tensor) -> Tensor:
    # Covers the name, so that a sound file under another block's name is detected, too.
    state = xxhash.xxh3_128(file.name.encode())
    state.update(block.contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(state.digest()), dtype=torch.uint8)


def read_block(file: Path, like: Tensor) -> Tensor:
    """Returns the block in `file`, of the shape and dtype of `like`.

    Raises:
        ValueError, OSError, SafetensorError: the file is missing, damaged or another block's.
    """
    # From memory: a file that is cut short while it is mapped would kill the process.
    tensors = safetensors.torch.load(file.read_bytes())
    if tensors.keys() != {"block", "digest"}:
        raise ValueError("holds no block")
    block = tensors["block"]
    if block.shape != like.shape or block.dtype != like.dtype:
        raise ValueError(f"holds a block {tuple(block.shape)} of {block.dtype}")
    if not torch.equal(_digest(file, block), tensors["digest"]):
        raise ValueError("is damaged")
    return block


def write_block(file: Path, block: Tensor) -> None:
    """Writes under a temporary name, then renames, so that a file is whole or absent."""
    data = safetensors.torch.save({"block": block.contiguous(), "digest": _digest(file, block)})
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(temporary).replace(file)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
