"""Copies weights out of mapped files: a write to such a file would change the model."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

_ALIGNMENT = 64


def unmap(model: nn.Module) -> None:
    """Copies weights and buffers of `model` that lie in mapped files into memory of the process.

    transformers maps safetensors files; on the CPU, what needs no conversion stays where it is in
    the file, and is read again whenever its pages were dropped. Weights that share memory share it
    afterwards.
    """
    mapped = _MappedFiles.now()
    tensors = itertools.chain(model.parameters(), model.buffers())
    found = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor in mapped]
    memory = _allocate(sum(map(_room, found)))
    copies: dict[tuple[object, ...], Tensor] = {}
    start = 0
    for tensor in found:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            nbytes = tensor.numel() * tensor.element_size()
            copy = memory[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor.data)
            start += _room(tensor)
        tensor.data = copies[key]


class _MappedFiles:
    """The addresses of this process that map a file."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._ranges = sorted(ranges)

    @classmethod
    def now(cls) -> _MappedFiles:
        return cls(list(_file_ranges(Path("/proc/self/maps").read_text(encoding="utf-8"))))

    def __contains__(self, tensor: Tensor) -> bool:
        at = bisect.bisect_right(self._ranges, (tensor.data_ptr(), 2**64)) - 1
        return at >= 0 and tensor.data_ptr() < self._ranges[at][1]


def _file_ranges(maps: str) -> Iterator[tuple[int, int]]:
    for line in maps.splitlines():
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            low, high = addresses.split("-")
            yield int(low, 16), int(high, 16)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _allocate(nbytes: int) -> Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        region.madvise(mmap.MADV_HUGEPAGE)  # a kernel without them: slower the first time
    return torch.frombuffer(region, dtype=torch.uint8)
