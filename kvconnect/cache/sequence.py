"""A live sequence, and the handles that keep blocks beyond it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvconnect.cache.resource_manager import PinnedBlocks
from kvconnect.cache.retention import RetentionPlan
from kvconnect.cache.segment import BlockIds, Segment, new_ids
from kvconnect.keys import KeyChain, Namespace

__all__ = ["PinHandle", "Sequence", "as_id_array"]


def as_id_array(ids: BlockIds) -> npt.NDArray[np.int32]:
    """A copy of `ids` that the caller owns."""
    return np.array(ids, np.int32)


class PinHandle(PinnedBlocks):
    """Blocks that stay until they are unpinned.

    Attributes:
        block_ids: int32, the blocks in order of their tokens, as of when they were pinned.
        segment: the deepest segment of the path it holds; ``None``: it holds nothing published.
        sequence: whose private blocks up to number `end` it holds, too; ``None``: none, or it
            ended.
        end: see `sequence`.
        loose: private blocks that no sequence has any more.
    """

    __slots__ = ("block_ids", "end", "loose", "segment", "sequence", "shares_private")

    def __init__(self, block_ids: npt.NDArray[np.int32]) -> None:
        self.block_ids = block_ids
        self.segment: Segment | None = None
        self.sequence: Sequence | None = None
        self.end = 0
        self.loose: BlockIds = new_ids()
        self.shares_private = False

    def __len__(self) -> int:
        return len(self.block_ids)


class Sequence:
    """The tokens and blocks of one request.

    Its first `published` blocks are in the tree, on the path down to `segment`; the others are
    private.

    Attributes:
        tokens: as native int32 bytes.
        ids: one per block.
        segment: the deepest published segment; ends exactly after `published` blocks. ``None``:
            none.
        published: leading blocks that are in the tree and referenced.
        computed: leading tokens that were matched or committed.
        matched: leading tokens that were matched.
        duplicate: number of the block that turned out to be published by another sequence.
        plan: retention by block.
        chain: keys of its full blocks.
        pins: handles that hold private blocks of it.
    """

    __slots__ = (
        "chain",
        "computed",
        "duplicate",
        "ids",
        "matched",
        "namespace",
        "pins",
        "plan",
        "published",
        "segment",
        "tokens",
    )

    def __init__(
        self, namespace: Namespace, tokens: bytearray, plan: RetentionPlan, chain: KeyChain | None
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.plan = plan
        self.chain = chain
        self.ids: BlockIds = new_ids()
        self.segment: Segment | None = None
        self.published = 0
        self.computed = 0
        self.matched = 0
        self.duplicate: int | None = None
        self.pins: list[PinHandle] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and appended tokens."""
        return len(self.tokens) // 4

    def drop_after(self, num_blocks: int) -> BlockIds:
        """Keep the first `num_blocks`; returns the others. Pins that hold them keep them, loose."""
        for pin in self.pins:
            if pin.end > num_blocks:
                pin.loose.extend(self.ids[num_blocks : pin.end])
                pin.end = num_blocks
        dropped = self.ids[num_blocks:]
        del self.ids[num_blocks:]
        return dropped

    def forget_computed(self, num_tokens: int) -> None:
        """At most the first `num_tokens` count as computed."""
        self.computed = min(self.computed, num_tokens)
        self.matched = min(self.matched, num_tokens)

    def disband(self) -> None:
        """The sequence ended: its pins keep what they hold of it, the private blocks loose."""
        for pin in self.pins:
            if pin.end > self.published:
                pin.loose.extend(self.ids[self.published : pin.end])
            pin.sequence = None
        self.pins.clear()
