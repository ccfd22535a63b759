"""Launches updates and appends as kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvconnect.kernels.blocks.strips import PlaneBytes
from kvconnect.kernels.blocks.work import AppendWork, UpdateWork
from kvconnect.kernels.cuda.compile.sources import vector_nbytes
from kvconnect.kernels.cuda.launch.launcher import NO_IDS, Grid, Launcher, Params, Rows, divisor


def launch_update(launcher: Launcher, work: UpdateWork, grid: Grid) -> tuple[object, ...]:
    """Launches a padded or packed `kv_cache_update` on the stream of `grid`.

    Returns the objects that the caller keeps until the kernel has ended.
    """
    cache, update, packed = work.cache, work.update, work.update_lengths is not None
    batch, heads, max_length, _ = cache.shape
    length = update.shape[0 if packed else 2]
    starts = launcher.ids(work.write_indices, max_length, grid.stream)
    lengths = NO_IDS
    if work.update_lengths is not None:
        lengths = launcher.ids(work.update_lengths, 0, grid.stream)
    steps = _byte_strides(update)
    ends = (
        *(cache.data_ptr(), *_byte_strides(cache)),
        *(update.data_ptr(), *((0, steps[1], steps[0]) if packed else steps)),
    )
    params = Params(
        (
            *ends,
            *starts.params,
            *lengths.params,
            *(batch, length),
            1 << (batch - 1).bit_length() - 1 if batch > 1 else 0,
            launcher.driver.error_word,
        ),
        (*divisor(heads if packed else length), *divisor(heads)),
    )
    row = cache.shape[3] * cache.element_size()
    rows = Rows(update.numel() // cache.shape[3], row, vector_nbytes(row, *ends))
    launcher.rows("update_packed" if packed else "update_padded", "update", rows, params, grid)
    return work, starts, lengths


def launch_append(launcher: Launcher, work: AppendWork, grid: Grid) -> tuple[object, ...]:
    """Launches `reshape_and_cache` on the stream of `grid`.

    Keys and values need one launch if their rows are equally long, else two. Returns the objects
    that the caller keeps until the kernels have ended.
    """
    kv = work.kv
    slots = launcher.ids(work.slots, kv.num_blocks * kv.tokens, grid.stream)
    sides = list(zip(work.states, kv.planes_of(range(work.layer, work.layer + 1)), strict=True))
    together = len({plane.row for _, plane in sides}) == 1
    errors = launcher.driver.error_word
    for some in [sides] if together else [[side] for side in sides]:
        _append(launcher, work, some, (*slots.params, len(work.slots), errors), grid)
        errors = 0  # a slot is counted once
    return work, slots


def _append(
    launcher: Launcher,
    work: AppendWork,
    sides: Sequence[tuple[Tensor, PlaneBytes]],
    listed: tuple[int, ...],
    grid: Grid,
) -> None:
    kv, row = work.kv, sides[0][1].row
    numbers: list[int] = []
    for state, plane in sides:
        numbers += (state.data_ptr(), *_byte_strides(state))
        numbers += (plane.offset, plane.block, plane.token, plane.head)
    bits = kv.tokens.bit_length() - 1
    if kv.tokens != 1 << bits:
        bits = -1
        divisor(kv.num_blocks * kv.tokens)  # such slots are divided as 32-bit numbers
    params = Params(
        (*numbers, *[0] * (14 - len(numbers)), *listed),
        (*divisor(kv.heads), *divisor(len(sides)), bits, *divisor(kv.tokens)),
    )
    num_rows = len(work.slots) * len(sides) * kv.heads
    rows = Rows(num_rows, row, vector_nbytes(row, *numbers))
    launcher.rows("append", "append", rows, params, grid)


def _byte_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the byte strides of all axes but the last, whose elements are contiguous."""
    size = tensor.element_size()
    return tuple(stride * size for stride in tensor.stride()[:-1])
