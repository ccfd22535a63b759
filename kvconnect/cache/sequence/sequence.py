"""A live sequence, and the handles that hold its blocks after its end."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.pool.held_blocks import HeldBlocks, PinnedPath, no_ids
from kvconnect.cache.resource_manager import PinnedBlocks
from kvconnect.cache.tree.retention import RetentionPlan
from kvconnect.cache.tree.segment import BlockIds
from kvconnect.errors import ConfigurationError
from kvconnect.keys import KeyChain, NamespaceId


class PinHandle(PinnedBlocks):
    """The blocks of a pin, which stay until they are unpinned.

    Attributes:
        block_ids: int32, the blocks of group 0 in order of their tokens, at the time of the pin; -1
            for a block that is not held, or is in secondary only.
        sequence: the live sequence whose private blocks the pin holds, too; ``None`` if there is
            none.
        held: the held blocks by pool group.
        shares_private: whether the pin was made of a sequence.
    """

    __slots__ = ("block_ids", "held", "sequence", "shares_private")

    def __init__(self, block_ids: npt.NDArray[np.int32], pools: Items[BlockPool]) -> None:
        self.block_ids = block_ids
        self.sequence: Sequence | None = None
        self.held = [PinnedPath(pool) for pool in pools]
        self.shares_private = False

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens and blocks of one request.

    Attributes:
        tokens: the tokens as native int32 bytes.
        held: the held blocks by pool group.
        attempted: how many leading blocks a commit has published, or left private as duplicates.
        computed: how many leading tokens were matched or committed.
        matched: how many leading tokens were matched.
        reserved: how many leading tokens have blocks in every pool.
        load_end: the end of what a store fills while the tokens before it are computed, in a cache
            with windows; 0 once these tokens are committed, and if there is no such load.
        plan: the retention of each block.
        chain: the chain of the keys of the full blocks; ``None`` if the prompt came without one.
        pins: the handles that hold private blocks of this sequence.
        state_ends: positions at which a snapshot of recurrent states is due, beside every interval.
        snapshot_end: position of a snapshot that no commit has reached yet; 0 if there is none.
        no_state_tokens: see `SequenceAllocation`.
    """

    namespace: NamespaceId
    tokens: bytearray
    plan: RetentionPlan
    chain: KeyChain | None
    held: Items[HeldBlocks]
    attempted: int = 0
    computed: int = 0
    matched: int = 0
    reserved: int = 0
    load_end: int = 0
    pins: list[PinHandle] = field(default_factory=list)
    state_ends: tuple[int, ...] = ()
    snapshot_end: int = 0
    no_state_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens, prompt and appended."""
        return len(self.tokens) // 4

    @property
    def num_blocks(self) -> int:
        """The number of blocks that its tokens need."""
        return len(self.held[0].ids)

    @property
    def is_published(self) -> bool:
        """Returns whether the sequence holds no private block in any pool."""
        for held in self.held:  # noqa: SIM110 - a generator costs several times as much
            if not held.is_published:
                return False
        return True

    def fill(self, held: HeldBlocks, start: int, ids: BlockIds) -> None:
        """Reserves the blocks from `start` on, which are not held; `ids` are private blocks.

        Pins that hold the blocks around them hold these, too.
        """
        if not ids:
            return
        stop = start + len(ids)
        for pin in self.pins:
            pinned = pin.held[held.pool.group]
            held.pool.private.hold(ids[max(pinned.first - start, 0) : max(pinned.end - start, 0)])
        held.ids[start:stop] = ids
        held.stop = max(held.stop, stop)

    def forget(self, held: HeldBlocks, start: int, stop: int) -> BlockIds:
        """Marks the blocks ``start..stop`` of one pool as not held.

        Returns the private blocks among them, for the caller to drop. Pins of private blocks keep
        them as loose blocks. The caller removes the references of published blocks.
        """
        private = self.hand_over(held, start, stop)
        start, stop = max(start, held.first), min(stop, held.stop)
        if start < stop:
            held.ids[start:stop] = no_ids(stop - start)
        return private

    def hand_over(self, held: HeldBlocks, start: int, stop: int) -> BlockIds:
        """Acts as `forget`, but leaves the ids unchanged, for a sequence that ends."""
        for pin in self.pins:
            pinned = pin.held[held.pool.group]
            pinned.loose.extend(held.private_ids(max(start, pinned.first), min(stop, pinned.end)))
        return held.private_ids(start, stop)

    def disband(self) -> None:
        """Removes the sequence from its pins, and the pins from the sequence, at its end.

        The pins then hold only published blocks and loose ones.
        """
        for pin in self.pins:
            pin.sequence = None
        self.pins.clear()


def check_position(field: str, position: int, num_tokens: int) -> None:
    """Checks that `position` is within the tokens of a sequence.

    Raises:
        ConfigurationError: (a ``ValueError``) `position` is outside ``0..num_tokens``; the message
            begins with `field`.
    """
    if not 0 <= position <= num_tokens:
        raise ConfigurationError(f"{field}: {position} is outside 0..{num_tokens}")
