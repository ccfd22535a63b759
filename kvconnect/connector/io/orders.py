"""The orders of loads and saves of blocks. Picklable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, overload

from kvconnect.keys import BlockKey, split_keys
from kvconnect.tokens import TokenArray

__all__ = ["BlockLoad", "BlockRun", "BlockSave", "LoadBlocks", "SaveOrder"]


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """A block to fetch: its chained key (not yet a store's) and its destination.

    Attributes:
        key: its chained key.
        block_id: where it goes in the pool of `group`.
        group: pool group.
        shares: it is stored with its heads divided into so many shares; ``None``: as the ranks save
            blocks of this group.
    """

    key: BlockKey
    block_id: int
    group: int = 0
    shares: int | None = None


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """A load of one request.

    Attributes:
        request_id: whose.
        start: leading tokens that are valid already, a multiple of tokens_per_block.
        end: leading tokens that are valid when all of `blocks` are there; perhaps inside the last.
        blocks: what to fetch, group by group, each in order of its tokens.
        overlaps: `blocks` go from the last one to the first, and the tokens before them are
            computed meanwhile.
        divisible: without its last blocks it still makes the tokens before them valid. False with
            windows or several pools: one missing block makes all of it useless.
    """

    request_id: int
    start: int
    end: int
    blocks: tuple[BlockLoad, ...]
    divisible: bool = True
    overlaps: bool = False

    def loaded_from(self, num_blocks: int, tokens_per_block: int) -> int:
        """Returns the first of the tokens up to `end` that are there after `num_blocks` blocks."""
        last = -(-self.end // tokens_per_block)
        return min(self.end, (last - num_blocks) * tokens_per_block)

    def num_valid(self, num_blocks: int, tokens_per_block: int) -> int:
        """Returns the leading valid tokens of the request after `num_blocks` blocks are loaded."""
        if num_blocks >= len(self.blocks):
            return self.end
        if not self.divisible:
            return self.start
        return min(self.end, self.start + num_blocks * tokens_per_block)


class BlockSave(NamedTuple):
    """A block to store.

    Attributes:
        key: its chained key.
        parent: chained key of the block before it, or of the namespace's root.
        number: which block of its request it is.
        block_id: where it is in the pool of `group`.
        tokens: its own; fewer than a whole block's for a tail. ``None``: unknown, but a whole
            block's.
        priority: retention priority.
        group: pool group.
    """

    key: BlockKey
    parent: BlockKey
    number: int
    block_id: int
    tokens: TokenArray | None
    priority: int
    group: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BlockRun(Sequence[BlockSave]):
    """A run of consecutive full blocks of one request in one pool group.

    The scheduler makes and sends a run at little cost; the workers make the blocks from it.

    Attributes:
        keys: the chained key before the first block, then those of the blocks, in a row.
        first: number of the first.
        block_ids: the ids of the blocks in the pool of `group`.
        tokens: the tokens of the blocks, in a row; must not change any more.
        priorities: retention priority of each one.
        group: pool group.
    """

    keys: bytes
    first: int
    block_ids: Sequence[int]
    tokens: TokenArray
    priorities: Sequence[int]
    group: int = 0

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return len(self.block_ids)

    def __iter__(self) -> Iterator[BlockSave]:
        """Returns an iterator over the blocks, by number."""
        parent, *keys = split_keys(self.keys)
        return map(
            BlockSave,
            keys,
            (parent, *keys),
            range(self.first, self.first + len(keys)),
            self.block_ids,
            self.tokens.reshape(len(keys), -1),
            self.priorities,
            repeat(self.group),
        )

    @overload
    def __getitem__(self, at: int) -> BlockSave: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[BlockSave, ...]: ...

    def __getitem__(self, at: int | slice) -> BlockSave | tuple[BlockSave, ...]:
        """Returns a block, or a tuple of blocks. Each call makes all blocks."""
        return tuple(self)[at]


@dataclass(frozen=True, slots=True, eq=False)
class SaveOrder:
    """Blocks of one request.

    Attributes:
        request_id: whose.
        blocks: what to store, by number and then by group: parents come before children.
        namespace: digest of salt and adapter, then one of the salt; see `Namespace.tag`.
        ttl_s: seconds after which they are not wanted any more; ``None``: no such time.
    """

    request_id: int
    blocks: Sequence[BlockSave]
    namespace: bytes = b""
    ttl_s: float | None = None
