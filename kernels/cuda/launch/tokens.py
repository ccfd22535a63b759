"""Updates, appends and transposes as kernel launches."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.kernels.blocks.work import AppendWork, TransposeWork, UpdateWork
from kvconnect.kernels.cuda.compile.sources import vector_nbytes
from kvconnect.kernels.cuda.launch.launcher import (
    NO_IDS,
    Grid,
    IdList,
    Launcher,
    Params,
    Rows,
    divisor,
)

__all__ = ["launch_append", "launch_transpose", "launch_update"]


def launch_update(launcher: Launcher, work: UpdateWork, grid: Grid) -> tuple[object, ...]:
    """`kv_cache_update`, both forms."""
    starts = launcher.ids(work.write_indices, work.max_length, grid.stream)
    packed = work.update_lengths is not None
    lengths = NO_IDS
    if work.update_lengths is not None:
        lengths = launcher.ids(work.update_lengths, 0, grid.stream)
    tail = divisor(work.heads if packed else work.length)
    params = Params(
        (
            *(work.cache, *work.cache_strides),
            *(work.update, *work.update_strides),
            *starts.params,
            *lengths.params,
            *(work.batch, work.length),
            1 << (work.batch - 1).bit_length() - 1 if work.batch > 1 else 0,
            launcher.driver.error_word,
        ),
        (*tail, *divisor(work.heads)),
    )
    width = vector_nbytes(
        *(work.cache, work.update, work.row_nbytes, *work.cache_strides, *work.update_strides)
    )
    count = work.length * work.heads * (1 if packed else work.batch)
    entry = "update_packed" if packed else "update_padded"
    launcher.rows(entry, "update", Rows(count, work.row_nbytes, width), params, grid)
    return work.keep, starts, lengths


def launch_append(launcher: Launcher, work: AppendWork, grid: Grid) -> tuple[object, ...]:
    """`reshape_and_cache`: keys and values in one launch if their rows are equally long."""
    num_slots = work.num_blocks * work.block_tokens
    slots = launcher.ids(work.slots, num_slots, grid.stream)
    sides = list(range(len(work.sources)))
    together = len({plane.row for plane in work.planes}) == 1
    errors = launcher.driver.error_word
    for some in [sides] if together else [[side] for side in sides]:
        _append(launcher, work, some, slots, errors, grid)
        errors = 0  # a slot is counted once
    return work.keep, slots


def _append(
    launcher: Launcher,
    work: AppendWork,
    sides: Sequence[int],
    slots: IdList,
    errors: int,
    grid: Grid,
) -> None:
    numbers: list[int] = []
    for side in sides:
        to = work.planes[side]
        numbers += (work.sources[side], *work.source_strides[side])
        numbers += (to.offset, to.block, to.token, to.head)
    row = work.planes[sides[0]].row
    bits = work.block_tokens.bit_length() - 1
    if work.block_tokens != 1 << bits:
        bits = -1
        divisor(slots.limit)  # such slots are divided as 32-bit numbers
    params = Params(
        (*numbers, *[0] * (14 - len(numbers)), *slots.params, work.num_tokens, errors),
        (
            *divisor(work.heads),
            *divisor(len(sides)),
            bits,
            *divisor(work.block_tokens),
        ),
    )
    rows = Rows(work.num_tokens * len(sides) * work.heads, row, vector_nbytes(row, *numbers))
    launcher.rows("append", "append", rows, params, grid)


def launch_transpose(launcher: Launcher, work: TransposeWork, grid: Grid) -> tuple[object, ...]:
    """`transpose_blocks`: in the order of the target, so that writes are whole lines."""
    source, target = work.source_strides, work.target_strides
    counts = (work.tokens, work.heads)
    outer, inner = (0, 1) if target[1] >= target[2] else (1, 0)
    params = Params(
        (
            *(work.source, source[0], source[1 + outer], source[1 + inner]),
            *(work.target, target[0], target[1 + outer], target[1 + inner]),
        ),
        (*divisor(counts[inner]), *divisor(counts[outer])),
    )
    width = vector_nbytes(work.source, work.target, work.row_nbytes, *source, *target)
    rows = Rows(work.outer * work.tokens * work.heads, work.row_nbytes, width)
    launcher.rows("transpose", "transpose", rows, params, grid)
    return (work.keep,)
