"""Launches copies of blocks as kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from kvconnect.kernels.blocks.runs import Runs, RunTable
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.cuda.compile.sources import vector_nbytes
from kvconnect.kernels.cuda.driver.interface import Memory
from kvconnect.kernels.cuda.launch.launcher import NO_IDS, Grid, Launcher, Params, Rows, divisor

INLINE_PAIRS = 128
"""The most pairs that a launch passes by value; the same as in ``copy_runs.cu``."""

_INLINE_NBYTES = 8 * INLINE_PAIRS
_NOTHING = bytes(_INLINE_NBYTES)
_ALIKE = ["nbytes", "token_nbytes", "source_step", "target_step"]
_COLUMNS = np.dtype([(name, np.int64) for name in ("source_offset", "target_offset", "skipped")])
"""A run in memory of the device: ``RunColumn`` of ``copy_runs.cu``."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The runs of a table that one launch can copy: of equal length and steps.

    Attributes:
        runs: ``[runs]`` of `_COLUMNS` on the device.
        num_runs: the number of runs.
        nbytes, token_nbytes: the size of a run, and of a token in it.
        source_step, target_step: the bytes from block to block.
        alignment: all sizes, steps and offsets, or-ed together; limits the width of accesses.
        token_alignment: the same for copies of prefixes.
    """

    runs: Memory
    num_runs: int
    nbytes: int
    token_nbytes: int
    source_step: int
    target_step: int
    alignment: int
    token_alignment: int


def launch_copy(launcher: Launcher, copy: BlockCopy, grid: Grid) -> tuple[object, ...]:
    """Launches the kernels of `copy` on the stream of `grid`. Does not block.

    Ids on the host are passed by value if they are few, or a graph is captured; else they are
    uploaded.

    Returns:
        The objects that the caller keeps until the kernels have ended.

    Raises:
        RuntimeError: a graph is captured, and only one side's ids are on the device.
    """
    num_pairs = len(copy)
    groups = _groups(launcher, copy.table)
    if copy.on_host and (num_pairs <= INLINE_PAIRS or launcher.driver.capturing(grid.stream)):
        for start in range(0, num_pairs, INLINE_PAIRS):
            few = copy.part(start, start + INLINE_PAIRS) if num_pairs > INLINE_PAIRS else copy
            for group in groups:
                _launch_inline(launcher, few, group, grid)
        return (copy.keep, groups)
    return (copy.keep, groups, *_launch_listed(launcher, copy, groups, grid))


def _launch_inline(launcher: Launcher, copy: BlockCopy, group: _Group, grid: Grid) -> None:
    raw = [
        _NOTHING if numbers is None else np.asarray(numbers).tobytes().ljust(_INLINE_NBYTES, b"\0")
        for numbers in (copy.source.ids, copy.target.ids, _prefixes(copy, group))
    ]
    entry = "copy_inline" if copy.num_tokens is None else "copy_inline_prefixes"
    _launch(launcher, copy, group, entry, _params(copy, group, (), b"".join(raw)), grid)


def _launch_listed(
    launcher: Launcher, copy: BlockCopy, groups: tuple[_Group, ...], grid: Grid
) -> tuple[object, ...]:
    source = launcher.ids(copy.source.ids, copy.source.num_blocks, grid.stream)
    target = launcher.ids(copy.target.ids, copy.target.num_blocks, grid.stream)
    errors = launcher.driver.error_word
    entry = "copy_listed" if copy.num_tokens is None else "copy_listed_prefixes"
    keep: list[object] = [source, target]
    for group in groups:
        prefixes = _prefixes(copy, group)
        limits = NO_IDS if prefixes is None else launcher.ids(prefixes, 0, grid.stream)
        keep.append(limits)
        listed = (*source.params, *target.params, limits.address, errors)
        _launch(launcher, copy, group, entry, _params(copy, group, listed, b""), grid)
        errors = 0  # an id is counted once
    return tuple(keep)


def _prefixes(copy: BlockCopy, group: _Group) -> npt.NDArray[np.int64] | None:
    return None if copy.num_tokens is None else copy.num_tokens * group.token_nbytes


def _launch(
    launcher: Launcher, copy: BlockCopy, group: _Group, entry: str, params: Params, grid: Grid
) -> None:
    alignment = group.alignment if copy.num_tokens is None else group.token_alignment
    width = vector_nbytes(alignment, copy.source.address, copy.target.address)
    rows = Rows(len(copy) * group.num_runs, group.nbytes, width)
    launcher.rows(entry, "copy_runs", rows, params, grid)


def _params(copy: BlockCopy, group: _Group, listed: tuple[int, ...], raw: bytes) -> Params:
    return Params(
        (
            *(copy.source.address, group.source_step, copy.target.address, group.target_step),
            *(group.runs.address, len(copy)),
        ),
        (*divisor(group.num_runs), *listed),
        raw,
    )


def _groups(launcher: Launcher, table: RunTable) -> tuple[_Group, ...]:
    # Kept beside the table, which lives as long as the layout that is copied from or to.
    kept = table.kept.get(launcher.driver)
    if kept is None:
        kept = table.kept.setdefault(launcher.driver, _upload(launcher, table.runs))
    return cast("tuple[_Group, ...]", kept)


def _upload(launcher: Launcher, runs: Runs) -> tuple[_Group, ...]:
    groups = []
    for alike in np.unique(runs[_ALIKE]):
        some = runs[runs[_ALIKE] == alike]
        nbytes, token_nbytes, source_step, target_step = alike.tolist()
        columns = np.empty(len(some), _COLUMNS)
        columns["source_offset"] = some["source_offset"]
        columns["target_offset"] = some["target_offset"]
        columns["skipped"] = some["first_token"] * token_nbytes
        offsets = some["source_offset"] | some["target_offset"]
        alignment = nbytes | source_step | target_step | int(np.bitwise_or.reduce(offsets))
        groups.append(
            _Group(
                runs=launcher.driver.constant(columns),
                num_runs=len(some),
                nbytes=nbytes,
                token_nbytes=token_nbytes,
                source_step=source_step,
                target_step=target_step,
                alignment=alignment,
                token_alignment=alignment | token_nbytes,
            )
        )
    return tuple(groups)
