"""The runs between two memories: computed once, and kept as long as both `PagedKv` live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import PlaneBytes, PlanePair, make_strips

__all__ = ["Partner", "row_table"]


def row_table(kv: PagedKv, layers: range, step: int, *, gathers: bool) -> RunTable:
    """Returns the runs of `layers` to a buffer whose blocks are `step` bytes apart, or from it.

    The table is kept in `kv`.
    """
    key = (gathers, layers.start, layers.stop, step)
    if (table := kv.tables.get(key)) is None:
        planes = kv.planes_of(layers)
        rows = _rows(kv, planes, step)
        table = _table(kv, planes, rows) if gathers else _table(kv, rows, planes)
        kv.tables[key] = table
    return table


class Partner:
    """The relation of a cache to another one that its blocks are copied to.

    Attributes:
        shift: block i of the target is block ``i + shift`` of the source; ``None`` if they share no
            block.
    """

    __slots__ = ("_tables", "shift")

    def __init__(self, source: PagedKv, target: PagedKv) -> None:
        self.shift = 0 if target is source else _shift(source, target)
        self._tables: dict[tuple[int, int, bool], RunTable] = {}

    def table(self, source: PagedKv, target: PagedKv, layers: range, *, by_token: bool) -> RunTable:
        """Returns the runs of `layers` from `source` to `target`; of whole tokens if `by_token`."""
        key = (layers.start, layers.stop, by_token)
        if (table := self._tables.get(key)) is None:
            planes = source.planes_of(layers), target.planes_of(layers)
            table = self._tables[key] = _table(source, *planes, by_token=by_token)
        return table


def _shift(source: PagedKv, target: PagedKv) -> int | None:
    distance, step = target.planes[0].offset - source.planes[0].offset, source.planes[0].block
    if not step or distance % step:
        return None
    for one, other in zip(source.planes, target.planes, strict=True):
        if replace(one, offset=one.offset + distance, memory=other.memory) != other:
            return None
    shift = distance // step
    return shift if -target.num_blocks < shift < source.num_blocks else None


def _rows(kv: PagedKv, planes: Sequence[PlaneBytes], step: int) -> list[PlaneBytes]:
    """Returns the locations that `planes` have in a contiguous buffer of blocks."""
    count, tokens_first = kv.tokens * kv.heads, kv.layout == "NHD"
    offsets = accumulate((count * plane.row for plane in planes), initial=0)
    return [
        PlaneBytes(
            offset=offset,
            block=step,
            token=plane.row * kv.heads if tokens_first else plane.row,
            head=plane.row if tokens_first else plane.row * kv.tokens,
            row=plane.row,
        )
        for plane, offset in zip(planes, offsets, strict=False)
    ]


def _table(
    kv: PagedKv,
    sources: Sequence[PlaneBytes],
    targets: Sequence[PlaneBytes],
    *,
    by_token: bool = False,
) -> RunTable:
    pairs = [PlanePair(*pair) for pair in zip(sources, targets, strict=True)]
    tokens_first = kv.layout == "NHD"
    return RunTable(
        make_strips(pairs, kv.tokens, kv.heads, tokens_first=tokens_first, by_token=by_token)
    )
