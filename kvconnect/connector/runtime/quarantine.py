"""The blocks that a transfer may still access, held until every worker has returned its id."""

from __future__ import annotations

from collections import OrderedDict

from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.connector.data import Direction
from kvconnect.connector.runtime.transfers import Transfer

_REMEMBERED = 1024


class Quarantine:
    """The blocks of ended transfers that a worker may still read or write.

    No timeout frees them. A load may still write to its blocks. A save may still read its blocks,
    and would store other content under the old content's keys. A request has at most one entry for
    each direction: while its load is held here, no new load of the same id starts.

    Args:
        kv: the cache manager of the blocks.
        ranks: the ranks whose workers have to return an id before its blocks are freed.
        max_blocks: no new load starts while more blocks are held.
    """

    def __init__(self, kv: BaseKVCacheManager, ranks: frozenset[int], max_blocks: int) -> None:
        self._kv = kv
        self._ranks = ranks
        self._max_blocks = max_blocks
        self._held: dict[tuple[Direction, int], Transfer] = {}
        self._ended: OrderedDict[tuple[Direction, int], None] = OrderedDict()
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, direction: Direction, request_id: int) -> bool:
        """Returns whether blocks of this transfer are held."""
        return (direction, request_id) in self._held

    def knows(self, request_id: int) -> bool:
        """Returns whether blocks of any transfer of this request are held."""
        return any(self.holds(direction, request_id) for direction in Direction)

    @property
    def num_save_blocks(self) -> int:
        """The number of blocks of saves that were not returned in time."""
        return sum(
            held.num_blocks
            for (direction, _), held in self._held.items()
            if direction is Direction.SAVE
        )

    def grace_until(self) -> float | None:
        """Returns when the last grace period ends, on the monotonic clock; ``None`` if empty."""
        return max((held.grace_until for held in self._held.values()), default=None)

    @property
    def full(self) -> bool:
        """Returns whether so many blocks are held that no new load may start."""
        return self.num_blocks > self._max_blocks

    def hold(
        self, transfer: Transfer, blocks: PinnedBlocks, *, num_blocks: int, grace_until: float
    ) -> None:
        """Holds the `blocks` of `transfer`, which has ended, until every rank is done with them.

        Args:
            transfer: the transfer; `returned` adds to its `done_ranks`.
            blocks: its blocks.
            num_blocks: the number of blocks in group 0.
            grace_until: the monotonic time at which requests stop waiting for the blocks.
        """
        transfer.blocks, transfer.num_blocks = blocks, num_blocks
        transfer.grace_until = grace_until
        self._held[transfer.direction, transfer.request_id] = transfer
        self.num_blocks += num_blocks

    def returned(self, direction: Direction, request_id: int, rank: int) -> None:
        """Records that a rank's worker is done with blocks that are held; the last frees them."""
        held = self._held[direction, request_id]
        held.done_ranks.add(rank)
        if held.done_ranks >= self._ranks:
            self._release(held)
            self.note_ended(direction, request_id)

    def note_ended(self, direction: Direction, request_id: int) -> None:
        """Permits a worker to return the id of this transfer, which no request waits for."""
        self._ended[direction, request_id] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def expects(self, direction: Direction, request_id: int) -> bool:
        """Returns whether a late return of this id is legal."""
        return (direction, request_id) in self._held or (direction, request_id) in self._ended

    def release_all(self) -> None:
        """Frees all blocks: the workers were shut down."""
        for held in list(self._held.values()):
            self._release(held)

    def _release(self, held: Transfer) -> None:
        del self._held[held.direction, held.request_id]
        self.num_blocks -= held.num_blocks
        if held.blocks is not None:
            self._kv.unpin(held.blocks)
