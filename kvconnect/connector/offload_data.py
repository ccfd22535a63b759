"""What the built-in scheduler tells the built-in worker. Picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvconnect.keys import BlockKey
from kvconnect.tokens import TokenArray

__all__ = ["BlockLoad", "BlockSave", "LoadBlocks", "OffloadMeta", "SaveOrder"]


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """One block to fetch: its chained key (not yet a store's) and where it goes in the pool."""

    key: BlockKey
    block_id: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """A load of one request, in order of its tokens.

    Attributes:
        request_id: whose.
        start: leading tokens that are valid already, a multiple of tokens_per_block.
        end: leading tokens that are valid when all of `blocks` are there; perhaps inside the last.
        blocks: what to fetch.
        group: pool group.
        is_async: in the background, or in the step it is ordered in.
    """

    request_id: int
    start: int
    end: int
    blocks: tuple[BlockLoad, ...]
    group: int = 0
    is_async: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class BlockSave:
    """One block to store.

    Attributes:
        key: its chained key.
        block_id: where it is in the pool.
        tokens: its own; fewer than a whole block's for a tail.
        priority: retention priority.
    """

    key: BlockKey
    block_id: int
    tokens: TokenArray
    priority: int


@dataclass(frozen=True, slots=True, eq=False)
class SaveOrder:
    """Blocks of one request that follow one another.

    Attributes:
        request_id: whose.
        first_block: number of the first of `blocks` in the request.
        parent: chained key of the block before it, or of the namespace's root.
        blocks: what to store.
        namespace: digest of salt and adapter.
        group: pool group.
    """

    request_id: int
    first_block: int
    parent: BlockKey
    blocks: tuple[BlockSave, ...]
    namespace: bytes = b""
    group: int = 0


@dataclass(frozen=True, slots=True)
class OffloadMeta:
    """A step's orders."""

    loads: tuple[LoadBlocks, ...] = field(default=())
    saves: tuple[SaveOrder, ...] = field(default=())
