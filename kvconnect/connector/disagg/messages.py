"""The orders for transfers between engines, from the leader to the workers. Picklable."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EndOrder", "FetchOrder", "PublishOrder"]


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """The part of a published prompt that a step computes.

    Attributes:
        request_id: whose.
        name: that it goes by on the control channel.
        begins: whether this is the first order since the request's blocks were allocated.
        num_tokens: the number of tokens that are published: the prompt's but the last one.
        first_blocks: of each pool group, the number of the first block in `blocks`.
        blocks: ids of blocks that were not sent before, by pool group; -1 where there is none.
        valid: leading tokens whose KV is valid before the step, in every layer.
        computed: leading tokens whose KV each layer's work in this step makes valid. 0: a later
            step, or the request's end, confirms them.
    """

    request_id: int
    name: str
    begins: bool
    num_tokens: int
    first_blocks: tuple[int, ...]
    blocks: tuple[list[int], ...]
    valid: int
    computed: int


@dataclass(frozen=True, slots=True)
class EndOrder:
    """A request that ended and whose blocks are kept for a reader.

    Attributes:
        request_id: whose.
        num_tokens: its leading valid tokens; 0: it was aborted, and no reader may use its blocks.
    """

    request_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """A load from another engine.

    Attributes:
        request_id: whose.
        name, address: what to fetch, and where.
        start: leading tokens that are valid already, a multiple of tokens_per_block.
        end: leading tokens that the load makes valid.
        first_blocks: of each pool group, the number of the first block to fetch.
        blocks: where they go: ids from that number on, by pool group.
        tp_size: ranks of the other engine; `address` is that of its first one.
    """

    request_id: int
    name: str
    address: str
    start: int
    end: int
    first_blocks: tuple[int, ...]
    blocks: tuple[list[int], ...]
    tp_size: int = 1
