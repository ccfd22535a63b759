"""The orders for transfers between engines, from the leader to the workers. Picklable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """The part of a published prompt that a step computes.

    Attributes:
        request_id: the id of the request.
        name: the transfer's name on the control channel.
        begins: true for the first order since the request's blocks were allocated.
        num_tokens: the number of published tokens: all of the prompt's except the last one.
        first_blocks: the number of the first block in `blocks`, for each pool group.
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
        request_id: the id of the request.
        num_tokens: the request's leading valid tokens; 0: it was aborted, and no reader may use its
            blocks.
    """

    request_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """A load from another engine.

    Attributes:
        request_id: the id of the request.
        name, address: the transfer's name, and the address of the engine that publishes it.
        start: leading tokens that are valid already, a multiple of tokens_per_block.
        end: leading tokens that the load makes valid.
        first_blocks: the number of the first block to fetch, for each pool group.
        blocks: the ids of the blocks to fill, from `first_blocks` on, by pool group.
        tp_size: the number of the other engine's ranks; `address` is that of the first.
        overlaps: true if the request computes meanwhile what has not come.
    """

    request_id: int
    name: str
    address: str
    start: int
    end: int
    first_blocks: tuple[int, ...]
    blocks: tuple[list[int], ...]
    tp_size: int = 1
    overlaps: bool = False
