"""The blocks of a part that have arrived, and those of them that are certain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvconnect.connector.disagg.fetch.pieces import FetchPlan, RemoteBlocks
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.control.messages import Watermark
from kvconnect.transfer.reads import Reads

_FINE_PIECES = 16
"""A prompt that the other engine has computed is read in so many pieces, its end first."""


class Arrivals:
    """The order in which a part is read beside computing, and the blocks that have come of it.

    While the other engine computes, its blocks are read from the first on. Once it has computed
    all, the last blocks come first. A block is certain once the other engine cannot have reused it
    before it was read: either that engine keeps the blocks and the lease held, or it has
    acknowledged a message that was sent after the read.

    Args:
        order: the order of the load, in one pool without a window.
        plan: the reads of the part.
        claim: the claim under which they are read.

    Attributes:
        floor: the leading blocks that the request has computed, and which are not read any more.
    """

    def __init__(self, order: FetchOrder, plan: FetchPlan, claim: Claimed) -> None:
        self._plan = plan
        self._claim = claim
        self._num_blocks = len(order.blocks[0])
        self._missing = np.zeros(self._num_blocks, np.int64)  # pieces that have not arrived
        self._arrived_at = np.full(self._num_blocks, np.inf)  # on the lease's clock
        self.floor = 0

    def raise_floor(self, floor: int) -> None:
        """Leaves out the leading `floor` blocks; does nothing if they are left out already."""
        if floor > self.floor:
            self.floor = floor
            self._plan.skip(floor)

    def take(self, computed: Watermark, remote: Sequence[RemoteBlocks]) -> list[Reads]:
        """Returns the next reads; empty if the other engine has to compute more first."""
        if self._claim.mark.kept:
            size = max(1, self._num_blocks // _FINE_PIECES)
            found = self._plan.take_last(size, computed, remote)
        else:
            found = self._plan.take(computed, remote)
        for reads in found:
            numbers = self._plan.numbers(reads)
            np.add.at(self._missing, numbers, 1)
            self._arrived_at[numbers] = np.inf
        return found

    def arrived(self, reads: Reads) -> None:
        """Records that all bytes of `reads` are here now."""
        numbers = self._plan.numbers(reads)
        np.subtract.at(self._missing, numbers, 1)
        here = numbers[self._missing[numbers] == 0]
        self._arrived_at[here] = self._claim.lease.now()

    @property
    def num_arrived(self) -> int:
        """Returns the number of blocks that have arrived."""
        return int(np.count_nonzero(self._arrived_at < np.inf))

    @property
    def all_here(self) -> bool:
        """Returns whether every block that is not computed has arrived, certain or not."""
        return self._plan.complete and not self._missing[self.floor :].any()

    @property
    def is_uncertain(self) -> bool:
        """Returns whether a block has arrived that is not certain."""
        here = self._arrived_at[self.floor :]
        return bool(np.any((here < np.inf) & (here >= self._certain_until())))

    def certain(self) -> tuple[int, int]:
        """Returns the end of the leading certain blocks, and the begin of the last certain ones.

        Computed blocks count as certain. If all are, it returns the number of blocks and 0.
        """
        there = self._arrived_at < self._certain_until()
        there[self._plan.num_taken : self._plan.stop] = False
        there[: self.floor] = True
        gaps = np.flatnonzero(~there)
        if not len(gaps):
            return self._num_blocks, 0
        return int(gaps[0]), int(gaps[-1]) + 1

    def _certain_until(self) -> float:
        lease, kept = self._claim.lease, self._claim.mark.kept
        return max(lease.confirmed, lease.end) if kept else lease.confirmed
