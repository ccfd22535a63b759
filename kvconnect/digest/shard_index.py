"""Decides whether an index of weight files selects among files, or only lists all shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePosixPath
from typing import TypeAlias

_SAFETENSORS = ".safetensors"
_MAX_HEADER = 100_000_000  # bytes, as the format's own library has it

Opened: TypeAlias = Callable[[str], int | None]
"""Returns the descriptor of a file by its name in the model's directory, if it is open."""


def weight_map(content: bytes) -> Mapping[str, str]:
    """Returns the file name of each tensor, from an index's `content`; empty if there is none."""
    try:
        parsed = json.loads(content)
    except ValueError:
        return {}
    found = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(found, dict):
        return {}
    return {name: file for name, file in found.items() if isinstance(file, str)}


def chooses(index: str, content: bytes, weights: Collection[str], opened: Opened) -> bool:
    """Returns whether loaders that use an index load other weights than loaders that do not.

    They load the same if the index names all files that are called like its shards, and each shard
    has exactly the tensors that the index names, and none twice. (The tensors of pickled files are
    not compared, since loaders load all of them.)

    Args:
        index: the name of the index in the model's directory.
        content: the bytes of the index.
        weights: the names of all files with weights.
        opened: returns the descriptor of a shard.
    """
    placed = weight_map(content)
    if not placed:
        return False
    folder, name = PurePosixPath(index).parent, PurePosixPath(index).name
    whole = name.partition(".index.")[0]  # the name of the file without shards
    stem, _, ending = whole.rpartition(".")
    paths = {file: (folder / file).as_posix() for file in set(placed.values())}
    named = set(paths.values())
    alike = {
        file
        for file in weights
        if PurePosixPath(file).parent == folder
        and PurePosixPath(file).name.startswith(stem)
        and file.endswith(f".{ending}")
    }
    if name != f"{whole}.index.json" or not named <= set(weights) or not alike <= named:
        return True
    if f".{ending}" != _SAFETENSORS:
        return False
    expected: dict[str, set[str]] = {file: set() for file in named}
    for tensor, file in placed.items():
        expected[paths[file]].add(tensor)
    return any(_tensors(opened(file)) != tensors for file, tensors in expected.items())


def _tensors(descriptor: int | None) -> set[str] | None:
    """Returns the names of the tensors in a safetensors file; ``None`` if it is not such a file."""
    if descriptor is None:
        return None
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= _MAX_HEADER:
        return None
    try:
        header = json.loads(os.pread(descriptor, length, 8))
    except ValueError:
        return None
    return header.keys() - {"__metadata__"} if isinstance(header, dict) else None
