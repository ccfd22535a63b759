"""Checks that all ops share: contiguous buffers, layers, paths, devices."""

from __future__ import annotations

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.kernels.blocks.paged import PagedKv

PATHS = ("auto", "kernel", "dma", "staged", "torch")
_ALL = slice(None)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a uint8 view of `tensor`, whose last axis must be contiguous, with a wider axis."""
    if tensor.stride(-1) != 1:  # a row of one element
        shape, strides = tensor.shape, (*tensor.stride()[:-1], 1)
        tensor = tensor.as_strided(shape, strides, tensor.storage_offset())
    return plain(tensor).view(torch.uint8)


def check_path(path: str) -> None:
    """Raises ValueError unless `path` is one of `PATHS`."""
    if path not in PATHS:
        raise ConfigurationError(f"path='{path}': {nearest(path, PATHS)}")


def layer_range(kv: PagedKv, layers: slice | range) -> range:
    """Returns the numbers of the layers of `kv` that `layers` selects.

    Raises:
        TypeError: `layers` is neither a slice nor a range.
        ValueError: the layers are not consecutive, or some do not exist.
    """
    if layers == _ALL:
        return range(kv.num_layers)
    if isinstance(layers, slice):
        found = range(*layers.indices(kv.num_layers))
    elif isinstance(layers, range):
        found = layers
    else:
        raise TypeError(f"layers: a slice or a range is needed, this is {type(layers).__name__}")
    if found.step != 1 or not 0 <= found.start <= max(found.start, found.stop) <= kv.num_layers:
        raise ConfigurationError(
            f"layers: {layers} must be of step 1 and within 0..{kv.num_layers}"
        )
    return range(found.start, max(found.start, found.stop))


def check_devices(name: str, kv: torch.device, other: torch.device) -> None:
    """Checks that `kv` and `other` are the same device, or that one of them is the host.

    Raises:
        RuntimeError: they are two devices; the message begins with `name`.
    """
    if kv != other and kv.type != "cpu" and other.type != "cpu":
        raise RuntimeError(f"{name}: on {other}, the cache is on {kv}")


def byte_rows(name: str, buffer: Tensor, kv: PagedKv, count: int, nbytes: int) -> Tensor:
    """Returns a view of `buffer` as uint8 ``[count, nbytes]``: a block in each contiguous row.

    Args:
        name: the argument's name, for messages.
        buffer: of the cache's dtype or uint8; contiguous, with `count` as first axis or with one
            axis only; or with two axes and any distance between rows.
        kv: the cache that `buffer` is copied to or from.
        count: the number of blocks that must fit exactly.
        nbytes: the size of a block in bytes.

    Raises:
        TypeError: `buffer` has another dtype, or is no tensor.
        ValueError: another shape, rows that are not contiguous or overlap, or memory of `kv`.
        RuntimeError: `buffer` is on another device than `kv`, and not on the host.
    """
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{name}: a tensor is needed, this is {type(buffer).__name__}")
    if buffer.dtype not in {torch.uint8, kv.dtype}:
        raise TypeError(f"{name}: {buffer.dtype}; {kv.dtype} or torch.uint8 is needed")
    check_devices(name, kv.device, buffer.device)
    rows = typed_rows(name, buffer, count, nbytes // buffer.element_size())
    if rows.dtype != torch.uint8:
        rows = rows.view(torch.uint8)
    if rows.untyped_storage().data_ptr() in kv.spans and count:
        low, high = kv.spans[rows.untyped_storage().data_ptr()]
        start = rows.data_ptr()
        if start < high and low < start + (count - 1) * rows.stride(0) + nbytes:
            raise ConfigurationError(f"{name}: shares memory with the cache")
    return rows


def typed_rows(name: str, buffer: Tensor, count: int, length: int) -> Tensor:
    """Returns a view of `buffer` as ``[count, length]`` elements. Raises as `byte_rows` does."""
    shape = buffer.shape
    if len(shape) == 2 and shape[0] == count and shape[1] == length:
        step, unit = buffer.stride()
        if (unit == 1 or length == 1) and (step >= length or count <= 1):
            return plain(buffer)
        raise ConfigurationError(f"{name}: strides {(step, unit)}; rows must be contiguous")
    fits = buffer.numel() == count * length and (len(shape) <= 1 or shape[0] == count)
    if not fits or not buffer.is_contiguous():
        raise ConfigurationError(
            f"{name}: {tuple(shape)}, strides {buffer.stride()}; {count} blocks of {length} "
            "elements, contiguous, are needed"
        )
    return plain(buffer).view(count, length) if count else plain(buffer).new_empty(0, length)


def plain(buffer: Tensor) -> Tensor:
    """Returns a view of `buffer` that may be written without checks of autograd or inference."""
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            memory = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
            return memory.set_(
                buffer.untyped_storage(), buffer.storage_offset(), buffer.shape, buffer.stride()
            )
    return buffer.detach() if buffer.requires_grad else buffer
