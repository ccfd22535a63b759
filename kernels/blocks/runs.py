"""All runs of a pair of blocks, as the host and a device copy them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvconnect.kernels.blocks.strips import Strip

__all__ = ["RunTable"]


@dataclass(frozen=True, slots=True, eq=False)
class RunTable:
    """All runs of a pair of blocks.

    Attributes:
        strips: them, for the host.
        nbytes: of all of them.
        num_runs: how many.
        device, host, few: what a device, and the host's copies, keep beside it.
    """

    strips: tuple[Strip, ...]
    nbytes: int
    num_runs: int
    device: dict[object, object] = field(default_factory=dict)
    host: list[object] = field(default_factory=list)
    few: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    _rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _prefixes: dict[int, RunTable] = field(default_factory=dict)

    @staticmethod
    def of(strips: Sequence[Strip]) -> RunTable:
        """A table of these."""
        return RunTable(
            tuple(strips),
            sum(strip.count * strip.nbytes for strip in strips),
            sum(strip.count for strip in strips),
        )

    def prefix(self, num_tokens: int) -> RunTable:
        """The runs of the first `num_tokens` (at least 1) tokens; of a table made for that."""
        table = self._prefixes.get(num_tokens)
        if table is None:
            table = RunTable.of([strip.prefix(num_tokens) for strip in self.strips])
            self._prefixes[num_tokens] = table
        return table

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """``[runs, 7]``: offsets of source and target, their steps, bytes, token, token bytes.

        The token is the first of the run. Made when first asked for.
        """
        if not self._rows:
            self._rows.append(_rows(self.strips))
        return self._rows[0]


def _rows(strips: Sequence[Strip]) -> npt.NDArray[np.int64]:
    parts = []
    for strip in strips:
        index = np.arange(strip.count, dtype=np.int64)
        part = np.empty((strip.count, 7), np.int64)
        part[:, 0] = strip.source.offset + index * strip.source.spacing
        part[:, 1] = strip.target.offset + index * strip.target.spacing
        part[:, 2] = strip.source.step
        part[:, 3] = strip.target.step
        part[:, 4] = strip.nbytes
        part[:, 5] = index if strip.across else 0
        part[:, 6] = strip.token_nbytes
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty((0, 7), np.int64)
