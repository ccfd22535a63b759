"""The comparison of a model's weights in memory with the files of its directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from fnmatch import fnmatchcase
from pickle import UnpicklingError
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kvconnect.digest.files import ModelFiles
from kvconnect.digest.memory import memory_place, pieces, same_bits
from kvconnect.digest.progress import in_threads

__all__ = ["difference_from_files"]

_SUFFIX = ".safetensors"
_PICKLED = "pytorch_model*.bin"
_PIECE = 1 << 20  # is compared while it is in the processor's cache

_Pair: TypeAlias = tuple[str, Tensor, Tensor]
"""The name of a weight, the weight in memory, and the one in a file, which PyTorch has mapped."""


def difference_from_files(model: PreTrainedModel, files: ModelFiles) -> str:
    """Returns how the weights in memory differ from those that `files` hold; empty: they do not.

    A weight equals its file if loading gives these bits: renamed, merged or split as transformers
    does it for this architecture, and cast to the dtype it has in memory. A weight that no file
    names must be one that another name shares. Weights that the model does not use are ignored.

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
        if tensor.shape != file.shape:
            return f"{name} has shape {list(tensor.shape)}, in the file {list(file.shape)}"
    compared = in_threads(_equal, pairs, lambda pair: pair[1].nbytes, "weights in memory")
    with closing(compared):
        differing = (pair[0] for pair, equal in zip(pairs, compared, strict=True) if not equal)
        first = next(differing, None)
    return "" if first is None else f"{first} differs from the file"


def _paired(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> tuple[list[_Pair], str]:
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


def _equal(pair: _Pair) -> bool:
    _, tensor, file = pair
    flat, done = file.reshape(-1), 0
    for piece in pieces(tensor, _PIECE):
        loaded = flat[done : done + piece.numel()]
        if piece.numel() and not same_bits(loaded.to(piece.device, piece.dtype), piece):
            return False
        done += piece.numel()
    return True


def _stored_tensors(files: ModelFiles) -> dict[str, Tensor] | None:
    """Returns all tensors of the files that transformers loads, by name; they are mapped.

    ``None`` if a file has another format, or two files have a tensor of one name.
    """
    names = list(files.weights)
    if not any(name.endswith(_SUFFIX) for name in names):
        names = [name for name in names if fnmatchcase(name, _PICKLED)]  # a trainer writes others
    found: dict[str, Tensor] = {}
    for name in names:
        read = _safetensors if name.endswith(_SUFFIX) else _pickled
        tensors = read(f"/proc/self/fd/{files.files[name].descriptor}")
        if tensors is None or found.keys() & tensors.keys():
            return None
        found |= tensors
    return found or None


def _safetensors(path: str) -> dict[str, Tensor] | None:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError:
        return None


def _pickled(path: str) -> dict[str, Tensor] | None:
    """Returns the tensors of a file that ``torch.save`` wrote, as transformers reads it.

    The file is of the model's directory, which the caller has loaded; it never comes from a store
    or a peer. ``weights_only`` still prevents it from running code.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError):  # another format, or PyTorch before 1.6
        return None
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        return None
    return found
