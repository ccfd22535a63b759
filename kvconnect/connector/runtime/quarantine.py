"""The blocks that a transfer may still access, held until every worker has returned its id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvconnect.cache.resource_manager import BaseKVCacheManager, PinnedBlocks
from kvconnect.connector.data import Direction

_REMEMBERED = 1024


@dataclass(slots=True)
class Quarantined:
    """The blocks of one transfer.

    Attributes:
        handle: holds the blocks.
        num_blocks: the number of blocks in group 0.
        pending_ranks: the ranks whose workers may still access the blocks.
        grace_until: the monotonic time at which requests stop waiting for the blocks.
    """

    handle: PinnedBlocks
    num_blocks: int
    pending_ranks: set[int]
    grace_until: float


class Quarantine:
    """The blocks of ended transfers that a worker may still read or write.

    No timeout frees them. A load may still write to its blocks. A save may still read its blocks,
    and would store other content under the old content's keys. A request has at most one entry for
    each direction: while its load is held here, no new load of the same id starts.

    Args:
        kv: the cache manager of the blocks.
        max_blocks: no new load starts while more blocks are held.
    """

    def __init__(self, kv: BaseKVCacheManager, max_blocks: int) -> None:
        self._kv = kv
        self._max_blocks = max_blocks
        self._held: dict[tuple[Direction, int], Quarantined] = {}
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

    def hold(self, direction: Direction, request_id: int, blocks: Quarantined) -> None:
        """Holds `blocks` until `returned` has been called for every pending rank."""
        self._held[direction, request_id] = blocks
        self.num_blocks += blocks.num_blocks

    def returned(self, direction: Direction, request_id: int, rank: int) -> None:
        """Records that a rank's worker is done with the blocks; the last one frees them."""
        held = self._held.get((direction, request_id))
        if held is None:
            return
        held.pending_ranks.discard(rank)
        if not held.pending_ranks:
            self._let_go((direction, request_id), held)
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
        for key, held in list(self._held.items()):
            self._let_go(key, held)

    def _let_go(self, key: tuple[Direction, int], held: Quarantined) -> None:
        del self._held[key]
        self.num_blocks -= held.num_blocks
        self._kv.unpin(held.handle)
