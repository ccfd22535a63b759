"""The orders of loads and saves of blocks. Picklable."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, overload

from kvconnect.keys import BlockKey, split_keys
from kvconnect.tokens import TokenArray


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """A block to load: its chained key, which is no store key yet, and its destination.

    Attributes:
        key: its chained key.
        block_id: the block of the pool that is filled.
        group: pool group.
        shares: the number of shares that its heads are divided into; ``None``: as the ranks save
            blocks of this group.
        number: the number of the block within its request, for loads that overlap.
    """

    key: BlockKey
    block_id: int
    group: int = 0
    shares: int | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """A load of one request.

    Attributes:
        request_id: the id of the request.
        start: leading tokens that are valid already, a multiple of tokens_per_block.
        end: leading tokens that are valid once all `blocks` are loaded; perhaps inside the last
            block.
        blocks: the blocks to load, group by group, each in order of its tokens; from the last
            number to the first if the load `overlaps`.
        overlaps: true if blocks are filled from the last to the first while the tokens before them
            are computed.
        divisible: true if the leading blocks alone make their tokens valid. False with windows or
            several pools: a missing block makes the whole load useless, unless it `overlaps`.
        alone: true if nothing is expected to be computed meanwhile: the load makes few calls, which
            disturb other requests less.
    """

    request_id: int
    start: int
    end: int
    blocks: tuple[BlockLoad, ...]
    divisible: bool = True
    overlaps: bool = False
    alone: bool = False

    def loaded_from(self, num_blocks: int, tokens_per_block: int) -> int:
        """Returns the token from which on all up to `end` are loaded after `num_blocks`.

        Once that token is computed, `end` tokens are valid: groups with a window have the blocks
        before it from computing, as far as they need them.
        """
        if num_blocks >= len(self.blocks):
            return self.start
        return min(self.end, (self.blocks[num_blocks].number + 1) * tokens_per_block)

    def num_from(self, number: int) -> int:
        """Returns how many blocks have a number of at least `number`, if the load `overlaps`."""
        return bisect_right(self.blocks, -number, key=lambda block: -block.number)

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
        number: the number of the block within its request.
        block_id: its block of the pool.
        tokens: its own tokens; a tail has fewer than a whole block. ``None``: unknown, but a whole
            block.
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
        keys: the chained key before the first block, followed by those of the blocks.
        first: the number of the first block.
        block_ids: the ids of the blocks in the pool of `group`.
        tokens: the tokens of all blocks, which must not change any more.
        priorities: retention priority of each block.
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
    """The blocks of one request that are to be saved.

    Attributes:
        request_id: whose.
        blocks: what to store, by number and then by group: parents come before children.
        namespace: digest of salt and adapter, then one of the salt; see `Namespace.tag`.
        expires_at: Unix seconds from which on they are not wanted any more; ``None``: no such time.
        end: the leading valid tokens of a request that has ended, whose blocks are kept until they
            are staged. `blocks` are those of which no save was ordered before.
        waits: true if the blocks of an ended request wait for staging memory; otherwise blocks
            without memory are dropped.
    """

    request_id: int
    blocks: Sequence[BlockSave]
    namespace: bytes = b""
    expires_at: float | None = None
    end: int = 0
    waits: bool = False
