"""Writes new tokens in host memory, to rows of a linear cache or to slots of a paged one."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.kernels.blocks.block_ids import Unpadded
from kvconnect.kernels.blocks.buffers import as_bytes
from kvconnect.kernels.blocks.paged import PagedKv

_KNOWN = {torch.float64, torch.float32, torch.float16}
"""The types that NumPy has, too; tensors of other types are viewed as bytes."""

_FEW_ROWS = 4  # moving up to so many one by one costs less than NumPy's views

_FEW_RUNS = 6  # moving up to so many one by one costs less than NumPy's calls
_FEW_NBYTES = 1 << 20
_THREADED_NBYTES = 1 << 18  # copies of at least this size gain from torch's threads


def append(states: tuple[Tensor, ...], kv: PagedKv, slots: Unpadded, layer: int) -> None:
    """Writes `states`, the new keys and values, to `slots` of one layer of `kv`; blocks.

    `slots` has the slots that are not padding, and the number of each one's token in `states`.
    """
    count = len(slots.ids)
    if count * kv.heads <= _FEW_ROWS:
        _write_few(states, kv, slots, layer)
        return
    where = slots.ids // kv.tokens, slots.ids % kv.tokens
    for state, plane in zip(states, _slot_arrays(kv, layer), strict=True):
        array = state.detach().numpy() if state.dtype in _KNOWN else as_bytes(state).numpy()
        rows = array.view(plane.dtype)[..., 0]
        plane[where] = rows if count == rows.shape[0] else rows[slots.positions]


def _slot_arrays(kv: PagedKv, layer: int) -> list[npt.NDArray[np.void]]:
    """Returns the layer's planes as arrays ``[num_blocks, T, heads]`` whose elements are rows."""
    if (known := kv.slot_arrays.get(layer)) is None:
        views = kv.layer_views(range(layer, layer + 1))
        known = [
            _slot_array(view if kv.layout == "NHD" else view.transpose(1, 2)) for view in views
        ]
        kv.slot_arrays[layer] = known
    return known


def _slot_array(view: Tensor) -> npt.NDArray[np.void]:
    with torch.inference_mode(mode=False):
        rows = view.view(torch.uint8).numpy()
    array: npt.NDArray[np.void] = rows.view(np.dtype((np.void, rows.shape[3])))[..., 0]
    return array


def _write_few(states: tuple[Tensor, ...], kv: PagedKv, slots: Unpadded, layer: int) -> None:
    numbers, positions = slots.ids.tolist(), slots.positions.tolist()
    size = kv.dtype.itemsize
    for state, plane in zip(states, kv.planes_of(range(layer, layer + 1)), strict=True):
        origin, row, heads = state.data_ptr(), plane.row, kv.heads
        token_step, head_step = state.stride(0) * size, state.stride(1) * size
        if head_step == plane.head == row:  # all heads of a token are one row
            heads, row = 1, row * heads
        for index, slot in zip(positions, numbers, strict=True):
            block, token = divmod(slot, kv.tokens)
            target = plane.offset + block * plane.block + token * plane.token
            source = origin + index * token_step
            for head in range(heads):
                ctypes.memmove(target + head * plane.head, source + head * head_step, row)


def update_padded(cache: Tensor, update: Tensor, starts: list[int]) -> None:
    """Sets ``cache[i, :, starts[i] + s] = update[i, :, s]``, as `reference.update_padded` does."""
    _, heads, length, row = update.shape
    nbytes = length * row * cache.element_size()
    batch = len(starts)
    in_runs = length == 1 or cache.stride(2) == update.stride(2) == row
    if in_runs and batch * heads <= _FEW_RUNS and batch * heads * nbytes < _FEW_NBYTES:
        _move_few(cache, update, starts, nbytes)
        return
    to_rows, from_rows = as_bytes(cache), as_bytes(update)
    if heads * nbytes >= _THREADED_NBYTES:
        for index, start in enumerate(starts):
            to_rows[index, :, start : start + length].copy_(from_rows[index])
        return
    to_array, from_array = to_rows.numpy(), from_rows.numpy()
    if length == 1 and batch > _FEW_RUNS:
        to_array[np.arange(batch), :, np.array(starts)] = from_array[:, :, 0]
        return
    for index, start in enumerate(starts):
        to_array[index, :, start : start + length] = from_array[index]


def _move_few(cache: Tensor, update: Tensor, starts: list[int], nbytes: int) -> None:
    size = cache.element_size()
    target, source = cache.data_ptr(), update.data_ptr()
    to_batch, to_head, to_row, _ = (stride * size for stride in cache.stride())
    from_batch, from_head = (stride * size for stride in update.stride()[:2])
    for index, start in enumerate(starts):
        to, origin = target + index * to_batch + start * to_row, source + index * from_batch
        for head in range(cache.shape[1]):
            ctypes.memmove(to + head * to_head, origin + head * from_head, nbytes)


def update_packed(cache: Tensor, update: Tensor, starts: list[int], ends: list[int]) -> None:
    """Writes packed sequences to `cache`, as `reference.update_packed` does."""
    to_array, from_array = as_bytes(cache).numpy(), as_bytes(update).numpy()
    if ends[-1] == len(starts) and len(starts) > 4 and ends == list(range(len(ends))):
        to_array[np.arange(len(starts)), :, np.array(starts)] = from_array
        return
    for index, start in enumerate(starts):
        first, stop = ends[index : index + 2]
        part = from_array[first:stop].swapaxes(0, 1)
        to_array[index, :, start : start + stop - first] = part
