"""The runs of a pair of blocks, as the host and a device copy them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnect.kernels.blocks.strips import Strip

RUN = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("source_offset", "target_offset", "source_step", "target_step"),
            *("nbytes", "first_token", "token_nbytes"),
        )
    ]
)
"""A run: its offsets in block 0, the bytes from block to block, its size and its first token."""

Runs: TypeAlias = npt.NDArray[np.void]
"""``[runs]`` of `RUN`."""


class RunTable:
    """The runs of a pair of blocks. Thread-safe.

    Args:
        strips: the runs, grouped as the host copies them.
        runs: the runs one by one; by default made of `strips` when first needed.

    Attributes:
        nbytes: the bytes of all runs of `strips`.
        num_runs: the number of runs of `strips`.
        kept: data that the host and devices cache with the table, by their own keys.
    """

    def __init__(self, strips: Iterable[Strip], runs: Runs | None = None) -> None:
        self.strips = tuple(strips)
        self.nbytes = sum(strip.count * strip.nbytes for strip in self.strips)
        self.num_runs = sum(strip.count for strip in self.strips)
        self.kept: dict[object, object] = {}
        self._prefixes: dict[int, RunTable] = {}
        if runs is not None:
            self.runs = runs

    def prefix(self, num_tokens: int) -> RunTable:
        """Returns the table of the first `num_tokens` (at least 1) tokens of each block.

        Only for tables of whole tokens (``by_token``).
        """
        table = self._prefixes.get(num_tokens)
        if table is None:
            table = RunTable(strip.prefix(num_tokens) for strip in self.strips)
            self._prefixes[num_tokens] = table
        return table

    @cached_property
    def runs(self) -> Runs:
        """The runs one by one, in the order of the strips."""
        runs = np.empty(self.num_runs, RUN)
        start = 0
        for strip in self.strips:
            part = runs[start : start + strip.count]
            start += strip.count
            index = np.arange(strip.count)
            part["source_offset"] = strip.source.offset + index * strip.source.spacing
            part["target_offset"] = strip.target.offset + index * strip.target.spacing
            part["source_step"] = strip.source.step
            part["target_step"] = strip.target.step
            part["nbytes"] = strip.nbytes
            part["first_token"] = index if strip.across else 0
            part["token_nbytes"] = strip.token_nbytes
        return runs

    @cached_property
    def run_list(self) -> list[tuple[int, ...]]:
        """The list of `runs` as plain numbers."""
        numbers: list[tuple[int, ...]] = self.runs.tolist()
        return numbers
