"""What the built-in scheduler tells the built-in worker. Picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvconnect.keys import BlockKey
from kvconnect.tokens import TokenArray

__all__ = ["BlockLoad", "BlockSave", "LoadBlocks", "OffloadMeta", "SaveOrder"]


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One block to fetch: its chained key (not yet a store's) and where it goes.

    Attributes:
        key: its chained key.
        block_id: where it goes in the pool of `group`.
        group: pool group.
    """

    key: BlockKey
    block_id: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """A load of one request.

    Attributes:
        request_id: whose.
        start: leading tokens that are valid already, a multiple of tokens_per_block.
        end: leading tokens that are valid when all of `blocks` are there; perhaps inside the last.
        blocks: what to fetch, group by group, each in order of its tokens.
        is_async: in the background, or in the step it is ordered in.
        divisible: without its last blocks it still makes the tokens before them valid. False with
            windows or several pools: one missing block makes all of it useless.
    """

    request_id: int
    start: int
    end: int
    blocks: tuple[BlockLoad, ...]
    is_async: bool = True
    divisible: bool = True

    def num_valid(self, num_blocks: int, tokens_per_block: int) -> int:
        """Leading valid tokens of the request once the first `num_blocks` blocks are there."""
        if num_blocks >= len(self.blocks):
            return self.end
        if not self.divisible:
            return self.start
        return min(self.end, self.start + num_blocks * tokens_per_block)


@dataclass(frozen=True, slots=True, eq=False)
class BlockSave:
    """One block to store.

    Attributes:
        key: its chained key.
        parent: chained key of the block before it, or of the namespace's root.
        number: which block of its request it is.
        block_id: where it is in the pool of `group`.
        tokens: its own; fewer than a whole block's for a tail.
        priority: retention priority.
        group: pool group.
    """

    key: BlockKey
    parent: BlockKey
    number: int
    block_id: int
    tokens: TokenArray
    priority: int
    group: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SaveOrder:
    """Blocks of one request.

    Attributes:
        request_id: whose.
        blocks: what to store, by number and then by group: parents come before children.
        namespace: digest of salt and adapter.
    """

    request_id: int
    blocks: tuple[BlockSave, ...]
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class OffloadMeta:
    """A step's orders."""

    loads: tuple[LoadBlocks, ...] = field(default=())
    saves: tuple[SaveOrder, ...] = field(default=())
