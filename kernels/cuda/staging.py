"""Tables for copies by way of a buffer on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.cuda.copy_policy import Direction

__all__ = ["Staging", "staging_of"]

_SOURCE, _TARGET, _SOURCE_STEP, _TARGET_STEP, _NBYTES = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """A copy in two: one side and the buffer, the buffer and the other side.

    In the buffer blocks follow each other, and the runs of a block are in the order in which they
    lie in host memory: what is in one piece there moves as one.

    Attributes:
        first: from the source to the buffer.
        second: from the buffer to the target.
        nbytes: of a block in the buffer.
    """

    first: RunTable
    second: RunTable
    nbytes: int


def staging_of(copy: BlockCopy, direction: Direction) -> Staging:
    """The two tables for the table of `copy`, kept beside it."""
    kept = copy.table.device.get(direction)
    if isinstance(kept, Staging):
        return kept
    made = _make(copy.table, _SOURCE if direction is Direction.LOAD else _TARGET)
    copy.table.device[direction] = made
    return made


def _make(table: RunTable, host_offset: int) -> Staging:
    rows = table.rows[np.argsort(table.rows[:, host_offset], kind="stable")]
    sizes = rows[:, _NBYTES]
    in_buffer, total = np.cumsum(sizes) - sizes, int(sizes.sum())
    first, second = rows.copy(), rows.copy()
    first[:, _TARGET], first[:, _TARGET_STEP] = in_buffer, total
    second[:, _SOURCE], second[:, _SOURCE_STEP] = in_buffer, total
    return Staging(_table(first, total), _table(second, total), total)


def _table(rows: npt.NDArray[np.int64], nbytes: int) -> RunTable:
    return RunTable((), nbytes, len(rows), _rows=[rows])
