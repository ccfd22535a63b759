"""The live sequences of a block manager, and its pins."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from kvconnect.cache.pool.held_blocks import NOT_HELD, as_id_array
from kvconnect.cache.pool.matching import first_in_window
from kvconnect.cache.sequence.sequence import PinHandle, Sequence
from kvconnect.cache.sequence.state_table import StateTable
from kvconnect.cache.tree.key_index import KeyIndex
from kvconnect.cache.tree.segment import Segment
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey


class PinTable(StateTable):
    """The live sequences, and the pins that hold blocks beside them.

    Pins hold published blocks by references to their path, and private ones by a count of holders.
    While the pinned sequence runs, the pin follows it: `Publication` handles blocks that become
    published, and `Sequence.forget` those that the sequence releases.
    """

    def pin(self, request_id: int) -> PinHandle:
        """Pins the blocks that the sequence holds now; they stay when the sequence ends."""
        sequence = self._get(request_id)
        handle = PinHandle(as_id_array(sequence.held[0].ids), self._pools)
        for held, pinned in zip(sequence.held, handle.held, strict=True):
            pool = held.pool
            pinned.segment, pinned.spans = held.segment, list(held.spans)
            pinned.claim()
            pinned.first, pinned.end = held.first, held.stop
            pool.private.num_pins += 1
            pool.private.hold(held.private_ids(held.first, held.stop))
        handle.shares_private = True
        handle.sequence = sequence
        sequence.pins.append(handle)
        self._pins.add(handle)
        return handle

    def pin_keys(self, keys: Items[BlockKey]) -> PinHandle:
        """Pins the longest leading run of published blocks with these keys, which may be empty.

        Only blocks of prompts with a `KeyChain` are found. The first call makes the key index,
        which hashes all published blocks.
        """
        if self._tree.index is None:
            self._tree.index = KeyIndex(self._tree.roots.values(), self._tree.tokens_per_block)
        found = self._tree.index.find(keys)
        num_blocks = 0 if found is None else self._matcher.usable_blocks(*found)
        if found is None or num_blocks == 0:
            handle = PinHandle(np.empty(0, np.int32), self._pools)
        else:
            handle = self._pin_path(self._place(found[0], num_blocks), num_blocks)
        self._pins.add(handle)
        return handle

    def _pin_path(self, segment: Segment, num_blocks: int) -> PinHandle:
        ids = np.full(num_blocks, NOT_HELD, np.int32)
        handle = PinHandle(ids, self._pools)
        size = self._tree.tokens_per_block
        for pinned in handle.held:
            first = first_in_window(pinned.pool.window, num_blocks * size) // size
            if first < num_blocks:
                self._place(segment, first)
                pinned.add(segment, first, num_blocks)
                pinned.claim()
        for step in handle.held[0].segments():
            own = step.pools[0].ids
            if own is not None:
                ids[step.start : step.end] = own
        return handle

    def _place(self, segment: Segment, block: int) -> Segment:
        # The segment of this path that ends before `block`, which becomes a boundary.
        while segment.start >= block and segment.parent is not None:
            segment = segment.parent
        return self._tree.split(segment, block) if block < segment.end else segment

    def unpin(self, handle: PinHandle) -> None:
        """Releases the blocks of `handle`. Blocks without another holder can be reclaimed.

        Raises:
            ConfigurationError: (a ``ValueError``) `handle` was unpinned before.
        """
        if handle not in self._pins:
            raise ConfigurationError("handle: not a pin of this manager, or unpinned already")
        self._pins.remove(handle)
        sequence = handle.sequence
        for pinned in handle.held:
            pool = pinned.pool
            pinned.let_go()
            private = pinned.loose
            if sequence is not None:
                held = sequence.held[pool.group]
                private = private + held.private_ids(pinned.first, pinned.end)
            pool.private.drop(private)
            pool.private.num_pins -= handle.shares_private
        if sequence is not None:
            sequence.pins.remove(handle)

    def detach(self, request_id: int, first_block: int) -> PinHandle:
        """Detaches the blocks from `first_block` on from the sequence, which gets fresh ones.

        The handle holds the detached blocks, unpublished, since a transfer may still write to them.
        At most ``first_block * tokens_per_block`` tokens of the sequence then count as computed.

        Raises:
            ConfigurationError: (a ``ValueError``) there is no such block, or it is published.
            OutOfBlocks: there are not enough blocks; nothing changed.
        """
        sequence = self._get(request_id)
        num_blocks = sequence.num_blocks
        if not 0 <= first_block <= num_blocks:
            raise ConfigurationError(f"first_block: {first_block} is outside 0..{num_blocks}")
        needs = []
        for held in sequence.held:
            published = held.spans[-1][1] if held.spans else 0
            if first_block < published:
                raise ConfigurationError(
                    f"first_block: block {first_block} is published, and others may use it; the "
                    f"first that can be detached is {published}"
                )
            # A state that a transfer may still write to is not a sequence's state any more.
            lost = max(held.stop - max(first_block, held.first), 0)
            needs.append(0 if held.pool.is_state else lost)
        for pool, need in zip(self._pools, needs, strict=True):
            pool.require(need)
        handle = PinHandle(as_id_array(sequence.held[0].ids[first_block:]), self._pools)
        for held, pinned, need in zip(sequence.held, handle.held, needs, strict=True):
            pinned.loose = sequence.forget(held, first_block, held.stop)
            if held.pool.is_state:
                held.stop = min(held.stop, first_block)
                held.first = min(held.first, held.stop)
            held.ids[held.stop - need : held.stop] = held.pool.allocate(need)
            held.duplicate = held.duplicate and first_block > (
                held.spans[-1][1] if held.spans else 0
            )
        self._forget_computed(sequence, first_block)
        self._pins.add(handle)
        return handle

    def _forget_computed(self, sequence: Sequence, first_block: int) -> None:
        num_tokens = first_block * self._tree.tokens_per_block
        sequence.computed = min(sequence.computed, num_tokens)
        sequence.matched = min(sequence.matched, num_tokens)
        sequence.attempted = min(sequence.attempted, first_block)
        if sequence.snapshot_end > num_tokens:
            sequence.snapshot_end = 0
        for pin in sequence.pins:
            for pinned in pin.held:
                pinned.end = min(pinned.end, first_block)
