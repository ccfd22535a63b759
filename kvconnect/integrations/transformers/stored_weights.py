"""The comparison of a model's weights in memory with the files of its directory."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pickle import UnpicklingError
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kvconnect.digest.files import ModelFiles
from kvconnect.digest.memory import as_bytes, memory_place, pieces, same_bits
from kvconnect.digest.progress import Progress

__all__ = ["MappedTensor", "StoredTensor", "difference_from_files"]

_SUFFIX = ".safetensors"
_PICKLED = "pytorch_model*.bin"
_MAX_HEADER = 100 << 20  # the format's own limit
_PIECE = 1 << 20  # is compared while it is in the processor's cache
_MAX_THREADS = 16
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor in an open file.

    Attributes:
        descriptor: of the file.
        dtype, shape: as stored.
        start: of its first byte in the file.
    """

    descriptor: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def elements(self, first: int, count: int, buffer: _Buffer) -> Tensor | None:
        """Returns `count` elements, which `buffer` holds; ``None`` if the file has fewer."""
        size = self.dtype.itemsize
        read = buffer.read(self.descriptor, self.start + first * size, count * size)
        return None if read is None else read.view(self.dtype)


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor in a file that PyTorch has mapped; `shape` as stored, `flat` in row-major order."""

    shape: tuple[int, ...]
    flat: Tensor

    def elements(self, first: int, count: int, _buffer: _Buffer) -> Tensor | None:
        """Returns `count` elements."""
        return self.flat[first : first + count]


_Stored: TypeAlias = StoredTensor | MappedTensor


def difference_from_files(model: PreTrainedModel, files: ModelFiles) -> str:
    """Returns how the weights in memory differ from those that `files` hold; empty: they do not.

    A weight equals its file if loading gives these bits: renamed, merged or split as transformers
    does it for this architecture, and cast to the dtype it has in memory. A weight that no file
    names must be one that another name shares. Of weights that the model does not use nothing is
    said.

    Blocks on file I/O, and logs every 5 seconds how far it is.

    Raises:
        OSError: a file cannot be read.
    """
    stored = _stored_tensors(files)
    if stored is None:
        return "no files of the directory that can be compared hold its weights"
    pairs, missing = _paired(model, stored)
    if missing:
        return f"{missing} is in no file"
    for name, tensor, file in pairs:
        if tuple(tensor.shape) != file.shape:
            return f"{name} has shape {list(tensor.shape)}, in the file {list(file.shape)}"
    return _first_difference(pairs)


def _paired(
    model: PreTrainedModel, stored: Mapping[str, _Stored]
) -> tuple[list[tuple[str, Tensor, _Stored]], str]:
    """Finds the file of each tensor; also returns the name of a tensor that has none."""
    state: dict[str, Tensor] = model.state_dict()
    reverted: Mapping[str, Tensor] = revert_weight_conversion(model, state)
    pairs, alone = [], []
    found = set()
    for name, tensor in reverted.items():
        file = next((stored[one] for one in _spellings(model, name) if one in stored), None)
        if file is None:
            alone.append((name, tensor))
        else:
            pairs.append((name, tensor, file))
            found.add(memory_place(tensor))
    missing = next((name for name, tensor in alone if memory_place(tensor) not in found), "")
    return pairs, missing


def _spellings(model: PreTrainedModel, name: str) -> Iterator[str]:
    """Yields the names under which files may hold a weight, with and without a prefix."""
    prefix = f"{model.base_model_prefix}."
    yield name
    yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name


def _first_difference(pairs: list[tuple[str, Tensor, _Stored]]) -> str:
    progress = Progress(sum(tensor.nbytes for _, tensor, _ in pairs), "weights in memory")
    buffer = _Buffer()
    pool = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "kvconnect-compare")
    try:
        pending = [
            (name, tensor.nbytes, pool.submit(partial(_equal, tensor, file, buffer)))
            for name, tensor, file in pairs
        ]
        for name, nbytes, one in pending:
            if not one.result():
                return f"{name} differs from the file"
            progress.advance(nbytes)
        return ""
    finally:
        pool.shutdown(cancel_futures=True)


def _equal(tensor: Tensor, file: _Stored, buffer: _Buffer) -> bool:
    done = 0
    for piece in pieces(tensor, _PIECE):
        count = piece.numel()
        if count == 0:
            continue
        loaded = file.elements(done, count, buffer)
        if loaded is None or not same_bits(loaded.to(piece.device, piece.dtype), piece):
            return False
        done += count
    return True


class _Buffer(threading.local):
    """The memory of each thread for a piece of a file."""

    def __init__(self) -> None:
        self._memory = torch.empty(8 * _PIECE, dtype=torch.uint8)  # of 8 bytes for 1 in memory

    def read(self, descriptor: int, start: int, nbytes: int) -> Tensor | None:
        """Returns `nbytes` bytes of a file; ``None`` if it has fewer."""
        piece = self._memory[:nbytes]
        view = as_bytes(piece)
        done = 0
        while done < nbytes:
            count = os.preadv(descriptor, [view[done:]], start + done)
            if count == 0:
                return None
            done += count
        return piece


def _stored_tensors(files: ModelFiles) -> dict[str, _Stored] | None:
    """Returns all tensors of the files that transformers loads, by name.

    ``None`` if a file has another format, or two files have a tensor of one name.
    """
    names = list(files.weights)
    if not any(name.endswith(_SUFFIX) for name in names):
        names = [name for name in names if fnmatchcase(name, _PICKLED)]  # a trainer writes others
    found: dict[str, _Stored] = {}
    for name in names:
        read = _header if name.endswith(_SUFFIX) else _mapped
        tensors = read(files.files[name].descriptor)
        if tensors is None or found.keys() & tensors.keys():
            return None
        found |= tensors
    return found or None


def _mapped(descriptor: int) -> Mapping[str, _Stored] | None:
    """Returns the tensors of a file that ``torch.save`` wrote, as transformers reads it.

    The file is of the model's directory, which the caller has loaded; it never comes from a store
    or a peer. ``weights_only`` runs no code of it all the same.
    """
    path = f"/proc/self/fd/{descriptor}"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError):  # of another format, or of PyTorch before 1.6
        return None
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        return None
    return {
        name: MappedTensor(tuple(one.shape), one.detach().reshape(-1))
        for name, one in found.items()
    }


def _header(descriptor: int) -> Mapping[str, _Stored] | None:
    """Returns the tensors of a file, see https://huggingface.co/docs/safetensors/index#format."""
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size > _MAX_HEADER:
        return None
    try:
        entries = json.loads(os.pread(descriptor, size, 8))
        return {
            name: StoredTensor(
                descriptor,
                _DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                8 + size + entry["data_offsets"][0],
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
