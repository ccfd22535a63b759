"""Copies runs between host memories at memcpy speed, without Python code for each run.

Three loops in C do the work: torch's row selection into strided rows (which uses all of torch's
threads), NumPy's assignment to indexed rows of opaque bytes, and memmove for few runs. All of them
release the interpreter lock.
"""

from __future__ import annotations

import ctypes
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.kernels.blocks.block_ids import Ids
from kvconnect.kernels.blocks.moves import Blocks, Moves
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import Side, Strip

_Opaque: TypeAlias = npt.NDArray[np.void]

_FEW_RUNS = 16
_FEW_NBYTES = 1 << 20
_SCRATCH_NBYTES = 1 << 18  # stays in the second-level cache
_ROW_NBYTES = 1 << 14  # rows of at least this size cost more than Python code for each
_THREADED_NBYTES = 1 << 18  # copies of at least this size gain from torch's threads


def copy_moves(moves: Moves) -> None:
    """Copies the blocks of `moves` between host memories. Blocks until all are copied."""
    source, target, source_ids, target_ids, _, table, counts, in_order = moves
    if counts is not None:
        for count in set(counts.tolist()):
            some = counts == count
            copy_moves(
                moves._replace(
                    source_ids=source_ids[some],
                    target_ids=target_ids[some],
                    table=table.prefix(count),
                    num_tokens=None,
                )
            )
        return
    pairs = len(source_ids)
    if pairs * table.num_runs <= _FEW_RUNS and pairs * table.nbytes < _FEW_NBYTES:
        _copy_few(table, source, target, source_ids.tolist(), target_ids.tolist())
        return
    ids = cast("Ids", source_ids), cast("Ids", target_ids)
    for strip in _host_strips(table, source, target):
        strip.copy(source, target, *ids, in_order=in_order)


def _copy_few(
    table: RunTable, source: Blocks, target: Blocks, source_ids: list[int], target_ids: list[int]
) -> None:
    origin = source.data_ptr() if isinstance(source, Tensor) else 0
    destination = target.data_ptr() if isinstance(target, Tensor) else 0
    for from_offset, to_offset, from_step, to_step, nbytes, _, _ in table.run_list:
        start, first = origin + from_offset, destination + to_offset
        for from_id, to_id in zip(source_ids, target_ids, strict=True):
            ctypes.memmove(first + to_id * to_step, start + from_id * from_step, nbytes)


def _host_strips(table: RunTable, source: Blocks, target: Blocks) -> list[_HostStrip]:
    kept = table.kept.get("host")
    if kept is None:
        made = [_HostStrip(strip, source, target) for strip in table.strips]
        kept = table.kept.setdefault("host", made)
    return cast("list[_HostStrip]", kept)


class _HostStrip:
    """A strip and the views of its paged sides, which are reused by each call."""

    __slots__ = ("_opaque", "_source", "_target", "_target_opaque", "_words", "strip")

    def __init__(self, strip: Strip, source: Blocks, target: Blocks) -> None:
        self.strip = strip
        self._opaque = np.dtype((np.void, strip.nbytes))
        sides = (strip.source, strip.target)
        self._words = not any((strip.nbytes | side.spacing | side.step) % 8 for side in sides)
        paged = [isinstance(side, PagedKv) for side in (source, target)]
        self._source = _view(source, strip.source, strip) if paged[0] else None
        self._target = _view(target, strip.target, strip) if paged[1] else None
        self._target_opaque = None if self._target is None else self._as_opaque(self._target)

    def copy(
        self, source: Blocks, target: Blocks, source_ids: Ids, target_ids: Ids, *, in_order: bool
    ) -> None:
        """Copies the runs of this strip for all pairs of blocks; blocks until they are copied."""
        strip, count = self.strip, len(source_ids)
        from_rows, to_rows, opaque = self._source, self._target, self._target_opaque
        if from_rows is None:
            from_rows = _view(source, strip.source, strip)
        if to_rows is None:
            to_rows = _view(target, strip.target, strip)
            if in_order:
                self._select(from_rows, source_ids, to_rows[:count])
                return
        pair_nbytes = strip.count * strip.nbytes
        if pair_nbytes >= _THREADED_NBYTES:
            for from_id, to_id in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
                to_rows[to_id].copy_(from_rows[from_id])
            return
        if opaque is None:
            opaque = self._as_opaque(to_rows)
        if self._source is None and in_order:
            opaque[target_ids] = self._as_opaque(from_rows)[:count]
        elif pair_nbytes >= _ROW_NBYTES:
            to_array, from_array = to_rows.numpy(), from_rows.numpy()
            for from_id, to_id in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
                to_array[to_id] = from_array[from_id]
        else:
            self._copy_through_scratch(from_rows, opaque, source_ids, target_ids)

    def _copy_through_scratch(
        self, rows: Tensor, opaque: _Opaque, source_ids: Ids, target_ids: Ids
    ) -> None:
        step = max(1, _SCRATCH_NBYTES // (self.strip.count * self.strip.nbytes))
        scratch = torch.empty((min(step, len(source_ids)), *rows.shape[1:]), dtype=torch.uint8)
        as_opaque = self._as_opaque(scratch)
        for start in range(0, len(source_ids), step):
            part = source_ids[start : start + step]
            self._select(rows, part, scratch[: len(part)])
            opaque[target_ids[start : start + step]] = as_opaque[: len(part)]

    def _select(self, rows: Tensor, ids: Ids, out: Tensor) -> None:
        if self._words and not (int(rows.storage_offset()) | int(out.storage_offset())) % 8:
            rows, out = rows.view(torch.int64), out.view(torch.int64)
        torch.index_select(rows, 0, torch.from_numpy(ids), out=out)

    def _as_opaque(self, rows: Tensor) -> _Opaque:
        """Returns an array view of `rows` in which each run is one element.

        Shapes ``[rows, nbytes]`` and ``[rows, runs, nbytes]`` lose their last axis.
        """
        array: _Opaque = rows.numpy().view(self._opaque)[..., 0]
        return array


def _view(rows: Blocks, side: Side, strip: Strip) -> Tensor:
    """Returns a view of the strip's runs on one side, as bytes ``[rows(, runs), nbytes]``."""
    if isinstance(rows, PagedKv):
        memory = rows.memories[side.memory]
        count, start = rows.num_blocks, side.offset - memory.data_ptr()
    else:
        memory, count, start = rows, rows.shape[0], int(rows.storage_offset()) + side.offset
    if strip.count == 1:
        return memory.as_strided((count, strip.nbytes), (side.step, 1), start)
    shape = (count, strip.count, strip.nbytes)
    return memory.as_strided(shape, (side.step, side.spacing, 1), start)
