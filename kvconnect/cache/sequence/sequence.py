"""A live sequence, and the handles that keep blocks beyond it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.pool.held_blocks import HeldBlocks, PinnedPath, no_ids
from kvconnect.cache.resource_manager import PinnedBlocks
from kvconnect.cache.tree.residence import BlockIds
from kvconnect.cache.tree.retention import RetentionPlan
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey, KeyChain, NamespaceId, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenBuffer

__all__ = ["PinHandle", "Sequence", "check_position"]


class PinHandle(PinnedBlocks):
    """The blocks of a pin, which stay until they are unpinned.

    Attributes:
        block_ids: int32, the blocks of group 0 in order of their tokens, as of when they were
            pinned; -1 where there is none, or only in secondary.
        sequence: the sequence whose private blocks the pin holds, too; ``None``: none, or it ended.
        held: by pool group.
        shares_private: whether it was made of a sequence.
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
        tokens: native int32 bytes.
        held: the blocks that it holds, by pool group.
        attempted: leading blocks that a commit published, or left private as duplicates.
        computed: leading tokens that were matched or committed.
        matched: leading tokens that were matched.
        reserved: leading tokens that there are blocks for in every pool.
        plan: retention by block.
        chain: keys of its full blocks.
        pins: handles that hold private blocks of it.
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
    pins: list[PinHandle] = field(default_factory=list)

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
        """Returns whether it has no private block."""
        for held in self.held:  # noqa: SIM110 - a generator costs several times as much
            if not held.is_published:
                return False
        return True

    def block_keys(self, tokens_per_block: int, layouts: Items[KvCacheLayout]) -> Items[BlockKey]:
        """Implements `BlockManager.block_keys`; `layouts` are those of the pools."""
        chain = self.chain
        if chain is None:
            root = root_key(b"", layouts, self.namespace)
            tokens = np.frombuffer(bytes(self.tokens), np.int32)
            chain = KeyChain(root, tokens_per_block, TokenBuffer(tokens))
        return chain.keys(0, self.num_tokens // tokens_per_block)

    def priorities(self, start: int) -> list[int]:
        """Implements `BlockManager.priorities`."""
        held = self.held[0]
        found: list[int] = []
        for run in self.plan.runs(0, len(held.ids)):
            retention = held.inherited if run.inherited else run.retention
            found.extend([retention.priority] * (run.stop - run.start))
        for step in held.segments():
            priority = held.pool.published.effective_priority(step)
            found[step.start : step.end] = [priority] * len(step)
        return found[start:]

    def forget(self, held: HeldBlocks, start: int, stop: int) -> BlockIds:
        """Gives up these blocks in one pool; returns the private ones among them.

        Pins that hold private ones keep them as loose blocks.
        """
        private = self.hand_over(held, start, stop)
        start, stop = max(start, held.first), min(stop, held.stop)
        if start < stop:
            held.ids[start:stop] = no_ids(stop - start)
        return private

    def hand_over(self, held: HeldBlocks, start: int, stop: int) -> BlockIds:
        """Does what `forget` does for a sequence that ends: its ids are not used any more."""
        for pin in self.pins:
            pinned = pin.held[held.pool.group]
            pinned.loose.extend(held.private_ids(max(start, pinned.first), min(stop, pinned.end)))
        return held.private_ids(start, stop)

    def disband(self) -> None:
        """Ends the sequence: its pins keep only the blocks that they hold themselves."""
        for pin in self.pins:
            pin.sequence = None
        self.pins.clear()


def check_position(field: str, position: int, num_tokens: int) -> None:
    """Refuses a position outside the tokens of a sequence.

    Raises:
        ConfigurationError: (a ``ValueError``) it is outside ``0..num_tokens``.
    """
    if not 0 <= position <= num_tokens:
        raise ConfigurationError(f"{field}: {position} is outside 0..{num_tokens}")
