"""Records changes of the cache, for routers and monitors."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from kvconnect.cache.memory.sizing import PoolSizes
from kvconnect.cache.tree.key_index import KeyIndex
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.cache.tree.segment import Root, Segment
from kvconnect.keys import BlockKey, root_key

PRIMARY, SECONDARY = 0, 1


@dataclass(frozen=True, slots=True)
class Created:
    """The event that a pool was made, with its blocks in each level: primary, secondary."""

    num_blocks_per_level: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """A block that can be reused now.

    Attributes:
        key: the chained key; for a partly filled block, of the tokens in the block.
        tokens: the tokens in the block.
        level: 0 for primary, 1 for secondary.
        priority: the retention priority.
        lora_id: the adapter of the namespace.
        has_cache_salt: whether the namespace has a salt.
        namespace: digest of the namespace, 32 bytes.
    """

    key: BlockKey
    tokens: tuple[int, ...]
    level: int
    priority: int
    lora_id: int | str | None
    has_cache_salt: bool
    namespace: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """The event that consecutive blocks became reusable.

    `parent_key` is the key of the block before them, ``None`` at the beginning of a prompt.
    """

    parent_key: BlockKey | None
    blocks: tuple[PublishedBlock, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """The event that blocks left all levels.

    Attributes:
        keys: the keys of the blocks.
        level: that they were in last, with the meaning of `PublishedBlock.level`.
        is_tail: they are one block that was partly filled.
    """

    keys: tuple[BlockKey, ...]
    level: int
    is_tail: bool = False


@dataclass(frozen=True, slots=True)
class Updated:
    """The event that a block changed its level or its priority.

    `level` and `priority` are (old, new), or ``None`` if unchanged. The end of a priority's
    duration is not reported. `is_tail` says that the block is partly filled.
    """

    key: BlockKey
    level: tuple[int, int] | None = None
    priority: tuple[int, int] | None = None
    is_tail: bool = False


@dataclass(frozen=True, slots=True)
class KvCacheEvent:
    """A change in one pool.

    Attributes:
        event_id: the number of the event; dropped events are counted, too.
        window: the attention window of the pool; ``None`` for full attention.
        data: the change.
    """

    event_id: int
    window: int | None
    data: Created | Stored | Removed | Updated


Change: TypeAlias = Created | Stored | Removed | Updated


class EventLog:
    """The newest events. A replay of all events yields the published blocks of each level.

    Attributes:
        is_on: whether events are kept.
        num_dropped: how many events were dropped, since `take` was not called in time.
    """

    def __init__(self, max_size: int, sizes: PoolSizes, tree: RadixTree) -> None:
        self.is_on = max_size > 0
        self.num_dropped = 0
        self._tree = tree
        self._layouts = sizes.layouts
        self._events: deque[KvCacheEvent] = deque(maxlen=max_size)
        self._next_id = 0
        if not self.is_on:
            return
        tree.index = KeyIndex((), tree.tokens_per_block)
        for group in sorted(
            range(len(self._layouts)), key=lambda g: self._layouts[g].window or inf
        ):
            self._add(group, Created((sizes.num_blocks[group], sizes.num_host_blocks[group])))

    def take(self) -> list[KvCacheEvent]:
        """Removes and returns the events, oldest first. May be called from any thread."""
        events: list[KvCacheEvent] = []
        with suppress(IndexError):  # another thread removes events at the same time
            # Not more than there are now, since events may be added faster than they are removed.
            events.extend(self._events.popleft() for _ in range(len(self._events)))
        return events

    def stored(self, group: int, segment: Segment, first: int = 0) -> None:
        """Records that the blocks of `segment` from its index `first` on were published."""
        keys = self._keys(segment, first)
        if not keys:
            return
        namespace = self._root(segment).namespace
        state = segment.pools[group]
        stride = self._tree.stride
        blocks = tuple(
            PublishedBlock(
                key,
                tuple(memoryview(segment.tokens[i * stride : (i + 1) * stride]).cast("i")),
                PRIMARY,
                state.retention.priority,
                namespace.lora_id,
                namespace.has_cache_salt,
                namespace.digest,
            )
            for i, key in enumerate(keys, first)
        )
        self._add(group, Stored(self._key_before(segment, first), blocks))

    def moved(self, group: int, segment: Segment, *, to_primary: bool) -> None:
        """Records that the blocks of `segment` changed their level."""
        level = (SECONDARY, PRIMARY) if to_primary else (PRIMARY, SECONDARY)
        is_tail = self._is_tail(segment)
        for key in self._keys(segment):
            self._add(group, Updated(key, level=level, is_tail=is_tail))

    def reprioritised(self, group: int, segment: Segment, priority: int) -> None:
        """Records that the blocks of `segment` change to `priority`; called before the change."""
        old = segment.pools[group].retention.priority
        is_tail = self._is_tail(segment)
        for key in self._keys(segment):
            self._add(group, Updated(key, priority=(old, priority), is_tail=is_tail))

    def removed(self, group: int, segment: Segment, first: int = 0) -> None:
        """Records that the blocks of `segment` from its index `first` on leave the pool.

        Called before they do.
        """
        keys = self._keys(segment, first)
        if keys:
            level = SECONDARY if segment.pools[group].ids is None else PRIMARY
            self._add(group, Removed(tuple(keys), level, self._is_tail(segment)))

    def removed_all(self) -> None:
        """Records that all blocks leave all pools; called before they do."""
        if not self.is_on:
            return
        for segment in self._tree.segments():
            for group, state in enumerate(segment.pools):
                if state.is_resident:
                    self.removed(group, segment)

    # ---------------------------------------------------------------- inside

    def _add(self, group: int, change: Change) -> None:
        if len(self._events) == self._events.maxlen:
            self.num_dropped += 1
        self._events.append(KvCacheEvent(self._next_id, self._layouts[group].window, change))
        self._next_id += 1

    def _keys(self, segment: Segment, first: int = 0) -> list[BlockKey]:
        # Returns the keys of the blocks from `first` on. A namespace without a key chain gets a
        # root that no store knows.
        index = self._tree.index
        if index is None:
            return []
        root = self._root(segment)
        if root.chain_root is None:
            self._tree.root(root.namespace, root_key(b"", self._layouts, root.namespace))
        return index.keys_of(segment, first)

    def _is_tail(self, segment: Segment) -> bool:
        return len(segment.tokens) < len(segment) * self._tree.stride

    def _key_before(self, segment: Segment, first: int) -> BlockKey | None:
        if first:
            return self._keys(segment, first - 1)[0]
        parent = segment.parent
        return (
            None
            if parent is None or parent.parent is None
            else self._keys(parent, len(parent) - 1)[0]
        )

    @staticmethod
    def _root(segment: Segment) -> Root:
        step: Segment = segment
        while step.parent is not None:
            step = step.parent
        if not isinstance(step, Root):
            raise TypeError(f"{step!r} is in no tree")
        return step
