"""The messages of vLLM's KV events (vllm/distributed/kv_events.py), declared for msgspec.

A message of the PUB socket has three frames: the topic, the number of the batch as 8 bytes big
endian, and the batch in msgpack: an array of time, events and rank. An event is a map whose
``type`` names its class here.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

GPU, CPU = "GPU", "CPU"
"""Values of ``medium``: the engine's own memory, and its host tier."""

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The number in the last message of a replay."""

Hash: TypeAlias = bytes | int
"""The name of a block; an engine sends either bytes or integers."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The event that consecutive blocks can be reused now.

    A block that only changed its medium has no `token_ids` and a `block_size` of 0.

    Attributes:
        block_hashes: the blocks' names, in the order of the prompt.
        parent_block_hash: the block before them; ``None`` at the beginning of a prompt.
        token_ids: the token ids of all these blocks, `block_size` for each.
        block_size: tokens of a block.
        lora_id: the adapter, if a number names it.
        medium: `GPU` or `CPU`.
        lora_name: the adapter, if a text names it.
        extra_keys: for each block, the inputs besides tokens and adapter that its name covers.
        group_idx: the pool group.
        kv_cache_spec_kind: ``full_attention`` or ``sliding_window``.
        kv_cache_spec_sliding_window: tokens of the window.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str | int] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The event that blocks left a medium; the attributes are those of `BlockStored`."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The event that no block can be reused any more; also sent after lost events."""


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in their order.

    Attributes:
        ts: the time of the batch, in seconds since the epoch.
        events: the events since the last batch.
        data_parallel_rank: the data parallel rank of the publisher.
    """

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


_EVENT_NBYTES = 400
"""More than an event has beside its tokens and blocks, but for the name of its adapter."""
_TOKEN_NBYTES = 5
_BLOCK_NBYTES = 2 + 32 + 4 + 64
"""The hexadecimal form of a key and of a digest."""


def most_nbytes(event: WireEvent) -> int:
    """Returns a bound of the bytes of `event` in a message."""
    match event:
        case BlockStored():
            name = 4 * len(event.lora_name or "")
            blocks = _BLOCK_NBYTES * len(event.block_hashes)
            return _EVENT_NBYTES + name + _TOKEN_NBYTES * len(event.token_ids) + blocks
        case BlockRemoved():
            return _EVENT_NBYTES + _BLOCK_NBYTES * len(event.block_hashes)
        case AllBlocksCleared():
            return _EVENT_NBYTES


def number_frame(number: int) -> bytes:
    """Returns the frame with the number of a batch."""
    return number.to_bytes(8, "big")


def batch_number(frame: bytes) -> int:
    """Returns the number in a frame; -1: the end of a replay."""
    return int.from_bytes(frame, "big", signed=True)
