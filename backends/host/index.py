"""The index of a region: which blocks it holds, and in which order they are evicted."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvconnect.backend import MAX_CHILDREN, Child, StoredBlock, StoredEntry
from kvconnect.backends.entries import BlockMetadata
from kvconnect.backends.quotas import Quotas, tenant_of
from kvconnect.keys import BlockKey


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A block of a region.

    `used` counts operations, not seconds. While `holds` is above zero a copy runs on its units.
    `pinned_until` is in Unix seconds. `hits` counts loads.
    """

    key: BlockKey
    metadata: BlockMetadata
    nbytes: int
    units: list[int]
    used: int
    created_at: float
    used_at: float
    holds: int = 0
    queued: bool = False
    dropped: bool = False
    pinned_until: float = 0.0
    hits: int = 0

    def entry(self) -> StoredEntry:
        """Returns the entry of the block for `Backend.scan`."""
        entry = self.metadata.entry(
            self.key, self.nbytes, created_at=self.created_at, used_at=self.used_at
        )
        pinned_until = self.pinned_until if self.pinned else 0.0
        return replace(entry, pinned_until=pinned_until, hits=self.hits)

    @property
    def pinned(self) -> bool:
        """Returns whether it is pinned now."""
        return self.pinned_until > time.time()

    @property
    def has_expired(self) -> bool:
        """Returns whether its own time is over, and no pin keeps it."""
        return self.metadata.has_expired and not self.pinned


class MemoryIndex:
    """The blocks by key, by parent and by order of eviction. Not thread-safe.

    Only leaves (blocks without stored children) are dropped: lowest priority first, then least
    recently used. So a chain is dropped from its end, and using a block keeps its ancestors. Pinned
    leaves are no candidates until their pins end. With `quotas`, the leaves of some tenants are
    dropped before those of others.
    """

    def __init__(self, num_units: int, quotas: Quotas | None = None) -> None:
        self.num_units = num_units
        self._quotas = quotas
        self._usage: Counter[bytes] = Counter()  # units by tenant
        # Taken from the end: blocks saved together get neighbouring units.
        self._free = list(range(num_units - 1, -1, -1))
        self._written: set[int] = set()  # units that held a block since they were overwritten
        self._blocks: dict[BlockKey, MemoryBlock] = {}
        self._children: dict[BlockKey | None, dict[BlockKey, None]] = {}
        # (priority, used, tie-break, block): each leaf once. `used` may be older than the block's
        # own, which is seen when it comes up; so using a block costs nothing here.
        # Of each tenant, with quotas; else all of them are one tenant's.
        self._leaves: dict[bytes, list[tuple[int, int, int, MemoryBlock]]] = {}
        self._pushes = 0
        self._clock = 0
        self._pinned: dict[BlockKey, MemoryBlock] = {}
        self._ends: list[tuple[float, int, MemoryBlock]] = []  # ends of pins, the earliest first

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[MemoryBlock]:
        return iter([block for block in self._blocks.values() if not block.has_expired])

    @property
    def units_used(self) -> int:
        """The units that are not free, those of blocks being copied in included."""
        return self.num_units - len(self._free)

    def tick(self) -> int:
        """Starts an operation; its uses are newer than all before."""
        self._clock += 1
        return self._clock

    def use(self, keys: Sequence[BlockKey]) -> list[MemoryBlock]:
        """Returns the leading blocks of `keys` that are present; they count as used now."""
        now, wall = self.tick(), time.time()
        found = []
        blocks = self._blocks
        for key in keys:
            block = blocks.get(key)
            if block is None:
                break
            if block.metadata.expires_at is not None and self.get(key) is None:
                break
            block.used, block.used_at = now, wall
            found.append(block)
        return found

    def get(self, key: BlockKey) -> MemoryBlock | None:
        """Returns the block of `key`, which does not count as used; drops it if it has expired."""
        block = self._blocks.get(key)
        if block is not None and block.metadata.expires_at is not None and block.has_expired:
            self._drop(block)
            return None
        return block

    def use_one(self, key: BlockKey, now: int) -> bool:
        """Returns whether `key` is present; it counts as used by operation `now`."""
        block = self.get(key)
        if block is not None:
            block.used, block.used_at = now, time.time()
        return block is not None

    def reserve(self, block: StoredBlock, num_units: int, now: int) -> MemoryBlock | None:
        """Reserves units for `block`, dropping older blocks; returns ``None`` if there is no room.

        Blocks that operation `now` has used, and the parent of `block`, are not dropped for it.
        """
        parent = None if block.parent is None else self._blocks.get(block.parent)
        if parent is not None:
            parent.used = now
        while len(self._free) < num_units:
            victim = self._victim(block, num_units, now)
            if victim is None:
                return None
            self._drop(victim)
        cut = len(self._free) - num_units
        units = self._free[: cut - 1 if cut else None : -1]
        del self._free[cut:]
        tokens = None if block.tokens is None else block.tokens.copy()
        metadata = replace(BlockMetadata.of(block), tokens=tokens)
        wall = time.time()
        self._written.update(units)
        self._usage[self._tenant(block.namespace)] += num_units
        return MemoryBlock(block.key, metadata, block.data.numel(), units, now, wall, wall)

    def publish(self, block: MemoryBlock) -> None:
        """Makes a reserved block present; frees its units if its key is present by now."""
        if block.key in self._blocks:
            self.cancel(block)
            return
        self._blocks[block.key] = block
        self._children.setdefault(block.metadata.parent, {})[block.key] = None
        self._queue(block)

    def cancel(self, block: MemoryBlock) -> None:
        """Frees the units of a block that was reserved and not published."""
        self._count_less(block)
        self._free.extend(reversed(block.units))

    def hold(self, blocks: Iterable[MemoryBlock]) -> None:
        """Keeps the units of `blocks` as they are until `release`."""
        for block in blocks:
            block.holds += 1

    def release(self, blocks: Iterable[MemoryBlock]) -> None:
        """Ends a `hold`."""
        for block in blocks:
            block.holds -= 1
            if block.dropped and not block.holds:
                self._free.extend(reversed(block.units))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Drops `keys`; absent ones are no error."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                self._drop(block)

    def take_leftovers(self, most: int) -> list[int]:
        """Returns up to `most` free units that held blocks, which the caller overwrites."""
        written = (unit for unit in self._free if unit in self._written)
        units = list(islice(written, most))
        self._written.difference_update(units)
        return units

    def pinned(self) -> list[MemoryBlock]:
        """Returns the blocks that are pinned now."""
        self._end_pins()
        return list(self._pinned.values())

    def pin(self, keys: Sequence[BlockKey], until: float | None, most_units: int) -> list[bool]:
        """Pins `keys` so that all pinned blocks take `most_units` at most; see `Backend.pin`."""
        left = most_units - sum(len(block.units) for block in self.pinned())
        answers = []
        for key in keys:
            block = self.get(key)
            was = key in self._pinned
            if block is None or (until is not None and not was and len(block.units) > left):
                answers.append(False)
                left = left if block is None else 0  # a child is not pinned without its parent
                continue
            if until is None:
                self._unpin(block)
            else:
                left -= 0 if was else len(block.units)
                self._pinned[key] = block
                block.pinned_until = until
                self._pushes += 1
                heapq.heappush(self._ends, (until, self._pushes, block))
            answers.append(was or until is not None)
        return answers

    def _unpin(self, block: MemoryBlock) -> None:
        block.pinned_until = 0.0
        if self._pinned.pop(block.key, None) is not None:
            self._queue(block)

    def _end_pins(self) -> None:
        """Makes blocks candidates again whose pins have ended."""
        now = time.time()
        while self._ends and self._ends[0][0] <= now:
            until, _, block = heapq.heappop(self._ends)
            if until == block.pinned_until and not block.dropped:  # the end of its last pin
                self._unpin(block)

    def children(self, key: BlockKey | None) -> list[Child]:
        """Returns those with tokens of the last `MAX_CHILDREN` blocks after `key`, last first."""
        newest = islice(reversed(self._children.get(key, {})), MAX_CHILDREN)
        blocks = (self._blocks[child] for child in newest)
        known = [(one.key, one.metadata.tokens) for one in blocks if not one.has_expired]
        return [Child(child, tokens) for child, tokens in known if tokens is not None]

    def _queue(self, block: MemoryBlock) -> None:
        if block.queued or block.key in self._children or block.key in self._pinned:
            return
        block.queued = True
        self._pushes += 1
        tenant = self._tenant(block.metadata.namespace)
        leaves = self._leaves.setdefault(tenant, [])
        heapq.heappush(leaves, (block.metadata.priority, block.used, self._pushes, block))
        if len(leaves) > 2 * self._usage[tenant] + 64:
            # Deleted blocks remain in the heap, which is rebuilt when they are many.
            leaves[:] = [leaf for leaf in leaves if not leaf[3].dropped]
            heapq.heapify(leaves)

    def _tenant(self, namespace: bytes) -> bytes:
        return b"" if self._quotas is None else tenant_of(namespace)

    def _count_less(self, block: MemoryBlock) -> None:
        """Subtracts the units of `block` from those of its tenant."""
        tenant = self._tenant(block.metadata.namespace)
        self._usage[tenant] -= len(block.units)
        if not self._usage[tenant]:  # there are as many tenants as salts
            del self._usage[tenant]
            self._leaves.pop(tenant, None)

    def _victim(self, block: StoredBlock, num_units: int, now: int) -> MemoryBlock | None:
        """Returns the block to drop next for `block`, which takes `num_units`, if any."""
        self._end_pins()
        if self._quotas is None:
            return self._oldest_leaf(b"", now)
        tenant = self._tenant(block.namespace)
        usage = self._usage + Counter({tenant: num_units})
        givers = self._quotas.givers(usage, self.num_units, {tenant})
        leaves = (self._oldest_leaf(giver, now) for giver, _ in givers)
        return next((leaf for leaf in leaves if leaf is not None), None)

    def _oldest_leaf(self, tenant: bytes, now: int) -> MemoryBlock | None:
        leaves = self._leaves.get(tenant, [])
        kept = []
        victim = None
        while leaves and victim is None:
            _, used, _, block = heapq.heappop(leaves)
            block.queued = False
            if block.dropped or block.key in self._children or block.key in self._pinned:
                continue
            if block.used != used:
                self._queue(block)
            elif block.holds or used >= now:
                kept.append(block)
            else:
                victim = block
        for block in kept:
            self._queue(block)
        return victim

    def _drop(self, block: MemoryBlock) -> None:
        block.dropped = True
        del self._blocks[block.key]
        self._pinned.pop(block.key, None)
        self._count_less(block)
        above = block.metadata.parent
        siblings = self._children[above]
        del siblings[block.key]
        if not siblings:
            del self._children[above]
            parent = None if above is None else self._blocks.get(above)
            if parent is not None:
                # The parent ends the chain now. It counts as used no earlier than its child.
                parent.used = max(parent.used, block.used)
                self._queue(parent)
        if not block.holds:
            self._free.extend(reversed(block.units))
