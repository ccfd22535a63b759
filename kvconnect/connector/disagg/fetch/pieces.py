"""The reads of blocks that the other engine has newly computed, and their destinations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvconnect.connector.disagg.fetch.strided import BlockRun, strided_reads
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import HeadSlice
from kvconnect.transfer.control.messages import Watermark
from kvconnect.transfer.reads import Reads

_MOST_PIECES = 1 << 16


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """The known blocks of a request on the other side, in one pool group.

    Attributes:
        region: the number of the pool at the other side's transport.
        first: the number, within the request, of the first known block.
        ids: the ids of the blocks from `first` on.
        layout: the layout of that pool.
    """

    region: int
    first: int
    ids: tuple[int, ...]
    layout: KvCacheLayout


class FetchPlan:
    """The reads of a load from one rank that have not been started.

    If blocks have the same layout on both sides, a read is one contiguous piece per block and run
    of layers.

    Args:
        order: the order of the load, with the blocks that it fills.
        layouts: the layouts of this side's pool groups.
        regions: the regions of this side's pools.
        heads: the heads that are read from that rank, by pool group; a missing group reads none.

    Attributes:
        stop: the first block, in the only pool, of those that `take_last` has returned.
    """

    def __init__(
        self,
        order: FetchOrder,
        layouts: Sequence[KvCacheLayout],
        regions: Sequence[int],
        heads: Mapping[int, HeadSlice],
    ) -> None:
        self._order = order
        self._layouts = layouts
        self._regions = regions
        self._heads = heads
        self.stop = max(map(len, order.blocks), default=0)
        self._ids: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        # By pool group and layer: the leading blocks of the order that were returned.
        self._asked = [
            [0 if group in heads else len(order.blocks[group])] * layout.num_layers
            for group, layout in enumerate(layouts)
        ]

    def lacks(self, remote: Sequence[RemoteBlocks]) -> bool:
        """Returns whether a window of the other engine has dropped tokens that blocks here hold."""
        return any(
            group in self._heads
            and bool(self._order.blocks[group] and one.ids)
            and one.first * one.layout.tokens_per_block > self._first_token(group)
            for group, one in enumerate(remote)
        )

    @property
    def complete(self) -> bool:
        """Returns whether `take` has returned every read."""
        return all(
            asked >= min(len(ids), self.stop)
            for ids, layers in zip(self._order.blocks, self._asked, strict=True)
            for asked in layers
        )

    @property
    def num_taken(self) -> int:
        """Returns how many leading blocks, in the only pool, `take` has returned or skipped."""
        return min(self._asked[0])

    def skip(self, num_blocks: int) -> None:
        """Makes `take` leave out the leading `num_blocks`, in the only pool."""
        self._asked[0] = [max(asked, num_blocks) for asked in self._asked[0]]

    def take_last(
        self, num_blocks: int, computed: Watermark, remote: Sequence[RemoteBlocks]
    ) -> list[Reads]:
        """Returns the reads of up to `num_blocks` blocks that no call has returned, the last ones.

        For a prompt in one pool without a window of which the other engine has computed all.
        Blocks of which `take` has returned some layers come first, by `take`.
        """
        first = max(self._asked[0])
        if self._num_known(0, remote[0]) < self.stop:
            return self.take(computed, remote)
        if min(self._asked[0]) < first:
            stop, self.stop = self.stop, min(self.stop, first)
            reads = list(self._take(0, computed, remote[0]))
            self.stop = stop
            return reads
        blocks = range(max(first, self.stop - num_blocks), self.stop)
        if not blocks:
            return []
        self.stop = blocks.start
        if self._is_same(0, remote[0]):
            return [self._reads(0, remote[0], blocks, 0, self._layouts[0].num_layers)]
        return self._strided(0, remote[0], blocks, range(self._layouts[0].num_layers))

    def numbers(self, reads: Reads) -> npt.NDArray[np.int64]:
        """Returns int64[n], the block of the order, in the only pool, that each piece is of."""
        if self._ids is None:
            ids = np.asarray(self._order.blocks[0], np.int64)
            by_id = np.argsort(ids)
            self._ids = ids[by_id], by_id
        ids, by_id = self._ids
        found: npt.NDArray[np.int64] = by_id[
            np.searchsorted(ids, reads.local_offsets // self._layouts[0].block_nbytes)
        ]
        return found

    def take(self, computed: Watermark, remote: Sequence[RemoteBlocks]) -> list[Reads]:
        """Returns the reads possible after `computed` tokens that were not returned before."""
        return [
            reads
            for group in range(len(self._layouts))
            for reads in self._take(group, computed, remote[group])
        ]

    def _take(self, group: int, computed: Watermark, remote: RemoteBlocks) -> Iterator[Reads]:
        layout, asked = self._layouts[group], self._asked[group]
        known = min(self._num_known(group, remote), self.stop)
        ready: dict[int, int] = {}  # grouped by leading tokens: few layers differ
        spans = []
        for index, number in enumerate(layout.layer_numbers):
            tokens = computed.tokens_of(number)
            if tokens not in ready:
                ready[tokens] = min(known, self._num_ready(group, tokens))
            spans.append((asked[index], max(asked[index], ready[tokens])))
            asked[index] = spans[-1][1]
        for (begin, end), run in groupby(range(len(spans)), key=spans.__getitem__):
            layers = list(run)
            if begin == end:
                continue
            if self._is_same(group, remote):
                yield self._reads(group, remote, range(begin, end), layers[0], len(layers))
            else:
                span = range(layers[0], layers[-1] + 1)
                yield from self._strided(group, remote, range(begin, end), span)

    def checks(self, remote: Sequence[RemoteBlocks]) -> Iterator[Reads]:
        """Yields reads of exactly the bytes that the load makes valid.

        The fetcher compares these bytes with the other engine's, which may have written behind the
        last token since the read.
        """
        for group, (layout, ids) in enumerate(zip(self._layouts, self._order.blocks, strict=True)):
            if not ids or group not in self._heads:
                continue
            first, size = self._order.first_blocks[group], layout.tokens_per_block
            whole = 0
            if self._is_same(group, remote[group]):
                whole = max(0, min(len(ids), self._order.end // size - first))
            if whole:
                yield self._reads(group, remote[group], range(whole), 0, layout.num_layers)
            rest, layers = range(whole, len(ids)), range(layout.num_layers)
            yield from self._strided(group, remote[group], rest, layers, exact=True)

    def _is_same(self, group: int, remote: RemoteBlocks) -> bool:
        return remote.layout == self._layouts[group]

    def _strided(
        self,
        group: int,
        remote: RemoteBlocks,
        blocks: range,
        layers: range,
        *,
        exact: bool = False,
    ) -> list[Reads]:
        layout, heads = self._layouts[group], self._heads[group]
        first = self._order.first_blocks[group] + blocks.start
        ids = self._order.blocks[group][blocks.start : blocks.stop]
        size = layout.tokens_per_block
        return strided_reads(
            BlockRun(remote.region, remote.layout, heads.source, remote.first, remote.ids),
            BlockRun(self._regions[group], layout, heads.target, first, ids),
            tokens=range(first * size, min((first + len(ids)) * size, self._order.end)),
            layers=layers,
            exact=exact,
        )

    def _first_token(self, group: int) -> int:
        return self._order.first_blocks[group] * self._layouts[group].tokens_per_block

    def _num_known(self, group: int, remote: RemoteBlocks) -> int:
        """Returns how many leading blocks of the order the other engine's known blocks fill."""
        theirs = remote.layout.tokens_per_block
        if not remote.ids or remote.first * theirs > self._first_token(group):
            return 0
        return self._num_filled(group, (remote.first + len(remote.ids)) * theirs)

    def _num_ready(self, group: int, tokens: int) -> int:
        """Returns how many leading blocks of the order may be read after `tokens` tokens."""
        if self._layouts[group].window is not None and tokens < self._order.end:
            return 0  # the other side frees blocks before its window
        return self._num_filled(group, tokens)

    def _num_filled(self, group: int, tokens: int) -> int:
        first, count = self._order.first_blocks[group], len(self._order.blocks[group])
        if tokens >= self._order.end:
            return count
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
    """Yields `reads` in parts of at most `most_nbytes`, but of at least one piece.

    A part has at most `_MOST_PIECES` pieces.
    """
    pieces = max(1, min(_MOST_PIECES, most_nbytes // reads.nbytes))
    if len(reads.local_offsets) <= pieces:
        yield reads
        return
    for start in range(0, len(reads.local_offsets), pieces):
        part = slice(start, start + pieces)
        yield replace(
            reads,
            remote_offsets=reads.remote_offsets[part],
            local_offsets=reads.local_offsets[part],
        )
