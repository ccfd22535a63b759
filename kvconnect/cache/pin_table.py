"""The live pins of a block manager."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Keys

import numpy as np

from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.key_index import KeyIndex
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.segment import Segment
from kvconnect.cache.sequence import PinHandle, Sequence, as_id_array
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey

__all__ = ["PinTable"]


class PinTable:
    """Pins hold published blocks by reference to their path, and private ones by count.

    What a pin holds of a running sequence changes hands as that goes on: see `Publisher` for blocks
    that become published, and `Sequence.drop_after` and `Sequence.disband` for those it gives up.
    """

    def __init__(self, tree: RadixTree, pool: BlockPool, tokens_per_block: int) -> None:
        self._tree = tree
        self._pool = pool
        self._tokens_per_block = tokens_per_block
        self._live: set[PinHandle] = set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def live(self) -> Collection[PinHandle]:
        """Those that were not unpinned. Not to be changed."""
        return self._live

    def pin(self, sequence: Sequence) -> PinHandle:
        """See `BlockManager.pin`."""
        handle = PinHandle(as_id_array(sequence.ids))
        self._hold_path(handle, sequence.segment)
        if sequence.published < len(sequence.ids):
            self._pool.hold(sequence.ids[sequence.published :])
            self._pool.num_private_pins += 1
            handle.shares_private = True
            handle.sequence, handle.end = sequence, len(sequence.ids)
            sequence.pins.append(handle)
        self._live.add(handle)
        return handle

    def pin_keys(self, keys: Keys[BlockKey]) -> PinHandle:
        """See `BlockManager.pin_keys`."""
        if self._tree.index is None:
            self._tree.index = KeyIndex(self._tree.roots.values(), self._tokens_per_block)
        found = self._tree.index.find(keys)
        if found is None:
            handle = PinHandle(np.empty(0, np.int32))
        else:
            segment, stop = found
            if stop < segment.end:
                segment = self._tree.split(segment, stop)
            ids = np.concatenate([as_id_array(step.ids) for step in segment.path()])
            handle = PinHandle(ids)
            self._hold_path(handle, segment)
        self._live.add(handle)
        return handle

    def unpin(self, handle: PinHandle) -> None:
        """See `BlockManager.unpin`."""
        if handle not in self._live:
            raise ConfigurationError("handle: not a pin of this manager, or unpinned already")
        self._live.remove(handle)
        self._pool.let_go(handle.segment, self._pool.next_moment())
        private = handle.loose
        if handle.sequence is not None:
            handle.sequence.pins.remove(handle)
            private = private + handle.sequence.ids[handle.sequence.published : handle.end]
        self._pool.drop(private)
        if handle.shares_private:
            self._pool.num_private_pins -= 1

    def detach(self, sequence: Sequence, first_block: int) -> PinHandle:
        """See `BlockManager.detach`."""
        if not 0 <= first_block <= len(sequence.ids):
            raise ConfigurationError(
                f"first_block: {first_block} is outside 0..{len(sequence.ids)}"
            )
        if first_block < sequence.published:
            raise ConfigurationError(
                f"first_block: block {first_block} is published, and others may use it; the first "
                f"that can be detached is {sequence.published}"
            )
        fresh = self._pool.allocate(len(sequence.ids) - first_block)
        detached = sequence.drop_after(first_block)
        sequence.ids.extend(fresh)
        sequence.forget_computed(first_block * self._tokens_per_block)
        if sequence.duplicate is not None and sequence.duplicate >= first_block:
            sequence.duplicate = None
        handle = PinHandle(as_id_array(detached))
        handle.loose = detached
        self._live.add(handle)
        return handle

    def _hold_path(self, handle: PinHandle, segment: Segment | None) -> None:
        if segment is not None:
            self._pool.claim(segment)
            handle.segment = segment
