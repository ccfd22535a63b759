"""The pools that engines read from each other, and the check of another engine's pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvconnect.connector.data import KvCachePool, LlmArgs
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import StoredHeads, stored_heads
from kvconnect.transfer.control.messages import Hello


def peer_layouts(layouts: Sequence[KvCacheLayout]) -> tuple[KvCacheLayout, ...]:
    """Returns the layouts of the pools that peers read.

    They are the connector's `layouts`, but for states: their parts, which only stores have apart,
    are one pool again, the last one.
    """
    states = [one for layout in layouts for one in layout.states]
    if not states:
        return tuple(layouts)
    others = [layout for layout in layouts if layout.kind != "state"]
    return (*others, KvCacheLayout.of_states(states, layouts[-1].tokens_per_block))


def peer_heads(llm_args: LlmArgs) -> tuple[StoredHeads, ...]:
    """Returns the KV heads of each of the `peer_layouts`."""
    layouts = peer_layouts(llm_args.layouts)
    return stored_heads(layouts, llm_args.place, llm_args.num_kv_heads[: len(layouts)])


def peer_pools(pools: Sequence[KvCachePool]) -> tuple[KvCachePool, ...]:
    """Returns the pools of the `peer_layouts`; their memory is that of `pools`."""
    layouts = peer_layouts([pool.layout for pool in pools])
    if len(layouts) == len(pools):
        return tuple(pools)
    last = pools[len(layouts) - 1].tensor  # the first part of the states; the others follow it
    shape = layouts[-1].flat_shape(len(last))
    states = last.as_strided(shape, last.stride(), last.storage_offset())
    return (*pools[: len(layouts) - 1], KvCachePool(layouts[-1], states))


def end_of_transfer(num_tokens: int, layouts: Sequence[KvCacheLayout]) -> int:
    """Returns how many leading tokens of a prompt of `num_tokens` a peer can fetch.

    The last token is computed for its logits. With recurrent states the tokens end with a block,
    where a snapshot is taken.
    """
    most = num_tokens - 1
    if any(layout.kind == "state" for layout in layouts):
        most -= most % layouts[0].tokens_per_block
    return most


def check_pools(ours: Hello, theirs: Hello, num_kv_heads: Sequence[int]) -> None:
    """Checks that this engine can read the other engine's blocks.

    tokens_per_block may differ, unless there are recurrent states, and the number of ranks that the
    heads are spread over.

    Args:
        ours: this engine's hello.
        theirs: the other engine's hello.
        num_kv_heads: the KV heads of each pool group in the whole model; empty: this side has them
            all.

    Raises:
        ConfigurationError: this engine cannot read them; names the field that differs.
    """
    mine = [one.layout() for one in ours.pools]
    found = [one.layout() for one in theirs.pools]
    totals = num_kv_heads or [one.num_kv_heads * ours.tp_size for one in mine]
    if len(mine) != len(found):
        raise ConfigurationError(f"pools: the peer has {len(found)}, this process {len(mine)}")
    if theirs.rank >= theirs.tp_size:
        raise ConfigurationError(f"rank: the peer says {theirs.rank} of {theirs.tp_size}")
    for own, their, total in zip(mine, found, totals, strict=True):
        share = total // min(theirs.tp_size, total)
        if their.num_kv_heads != share:
            raise ConfigurationError(
                f"num_kv_heads: the peer's blocks have {their.num_kv_heads}; of {total}, a rank of "
                f"{theirs.tp_size} has {share}"
            )
        if own.kind == "state" and their.tokens_per_block != own.tokens_per_block:
            raise ConfigurationError(
                f"tokens_per_block: the peer's is {their.tokens_per_block}, this process has "
                f"{own.tokens_per_block}; recurrent states are at the ends of blocks"
            )
        like = replace(own, num_kv_heads=share, tokens_per_block=their.tokens_per_block)
        if their != like:
            raise ConfigurationError("pools: the peer's blocks are of another layout than these")
