"""The check of another engine's pools: whether this engine can read from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvconnect.errors import ConfigurationError
from kvconnect.transfer.control.messages import Hello

__all__ = ["check_pools"]


def check_pools(ours: Hello, theirs: Hello, num_kv_heads: Sequence[int]) -> None:
    """Checks that this engine can read the other engine's blocks.

    tokens_per_block may differ, and the number of ranks that the heads are spread over.

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
        like = replace(own, num_kv_heads=share, tokens_per_block=their.tokens_per_block)
        if their != like:
            raise ConfigurationError("pools: the peer's blocks are of another layout than these")
