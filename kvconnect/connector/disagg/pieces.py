"""Which bytes of which blocks a watermark newly covers, and where they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.layout import KvCacheLayout
from kvconnect.transfer.leases.table import Mark
from kvconnect.transfer.reads import Reads

__all__ = ["Coverage", "FetchPlan", "RemoteBlocks", "cut_reads"]


class Coverage:
    """How many leading tokens of a prompt each layer of the model holds; only ever grows."""

    __slots__ = ("_before", "_mark")

    def __init__(self) -> None:
        self._mark = Mark()
        self._before = 0

    def advance(self, mark: Mark) -> bool:
        """The first layers of `mark` hold its tokens; the others what it or an earlier one said.

        Once a later chunk is computed, every layer holds the one before. Whether it was news.
        """
        if mark <= self._mark:
            return False
        if mark.tokens > self._mark.tokens:
            self._before = max(self._mark.tokens, mark.before)
        self._mark = mark
        return True

    def __getitem__(self, layer: int) -> int:
        """Leading tokens that layer number `layer` of the model holds."""
        return self._mark.tokens if layer < self._mark.layers else self._before


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """The other side's blocks of a request in one pool group, as far as they are known.

    Attributes:
        region: its pool's number at its transport.
        first: number of the first of them within the request.
        ids: of the blocks from that on.
    """

    region: int = 0
    first: int = 0
    ids: tuple[int, ...] = ()


class FetchPlan:
    """What of a load is still to be asked for. One contiguous piece per block and run of layers.

    Args:
        order: what to fetch, and the blocks that it goes to.
        layouts: of the pool groups, the same on both sides.
        regions: of this side's pools.
    """

    def __init__(
        self, order: FetchOrder, layouts: Sequence[KvCacheLayout], regions: Sequence[int]
    ) -> None:
        self._order = order
        self._layouts = layouts
        self._regions = regions
        # By pool group and layer of it: leading blocks of the order that were asked for.
        self._asked = [[0] * layout.num_layers for layout in layouts]

    @property
    def nbytes(self) -> int:
        """Of the whole load."""
        return sum(
            len(ids) * layout.block_nbytes
            for ids, layout in zip(self._order.blocks, self._layouts, strict=True)
        )

    @property
    def complete(self) -> bool:
        """Whether everything was asked for."""
        return all(
            asked == len(ids)
            for ids, layers in zip(self._order.blocks, self._asked, strict=True)
            for asked in layers
        )

    def take(self, coverage: Coverage, remote: Sequence[RemoteBlocks]) -> list[Reads]:
        """What `coverage` allows to read and was not taken before."""
        return [
            reads
            for group in range(len(self._layouts))
            for reads in self._take(group, coverage, remote[group])
        ]

    def _take(self, group: int, coverage: Coverage, remote: RemoteBlocks) -> Iterator[Reads]:
        layout, asked = self._layouts[group], self._asked[group]
        known = self._num_known(group, remote)
        spans = []
        for index, number in enumerate(layout.layer_numbers):
            ready = min(known, self._num_ready(group, coverage[number]))
            spans.append((asked[index], max(asked[index], ready)))
            asked[index] = spans[-1][1]
        for (begin, end), run in groupby(range(len(spans)), key=spans.__getitem__):
            layers = list(run)
            if begin < end:
                yield self._reads(group, remote, range(begin, end), layers[0], len(layers))

    def _num_known(self, group: int, remote: RemoteBlocks) -> int:
        first, count = self._order.first_blocks[group], len(self._order.blocks[group])
        if remote.first > first:
            return 0
        return max(0, min(count, remote.first + len(remote.ids) - first))

    def _num_ready(self, group: int, tokens: int) -> int:
        """Leading blocks of the order that `tokens` tokens fill."""
        first, count = self._order.first_blocks[group], len(self._order.blocks[group])
        if tokens >= self._order.end:
            return count
        if self._layouts[group].window is not None:
            return 0  # what it holds before the end is given up again
        return max(0, min(count, tokens // self._layouts[group].tokens_per_block - first))

    def _reads(
        self, group: int, remote: RemoteBlocks, blocks: range, layer: int, num_layers: int
    ) -> Reads:
        layout = self._layouts[group]
        skipped = self._order.first_blocks[group] - remote.first + blocks.start
        far = np.array(remote.ids[skipped : skipped + len(blocks)], np.int64)
        near = np.array(self._order.blocks[group][blocks.start : blocks.stop], np.int64)
        within = layer * layout.layer_nbytes
        return Reads(
            remote_region=remote.region,
            remote_offsets=far * layout.block_nbytes + within,
            local_region=self._regions[group],
            local_offsets=near * layout.block_nbytes + within,
            nbytes=num_layers * layout.layer_nbytes,
        )


def cut_reads(reads: Reads, most_nbytes: int) -> Iterator[Reads]:
    """`reads` in parts of at most `most_nbytes`, of one piece at least."""
    if reads.total_nbytes <= most_nbytes:
        yield reads
        return
    pieces = max(1, most_nbytes // reads.nbytes)
    for start in range(0, len(reads.local_offsets), pieces):
        part = slice(start, start + pieces)
        yield replace(
            reads,
            remote_offsets=reads.remote_offsets[part],
            local_offsets=reads.local_offsets[part],
        )
