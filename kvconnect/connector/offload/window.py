"""Which blocks of a pool group a position needs."""

from __future__ import annotations

__all__ = ["blocks_needed"]


def blocks_needed(window: int | None, end: int, tokens_per_block: int) -> range:
    """Numbers of the blocks without which tokens from `end` on cannot be computed.

    With full attention (`window` is ``None``) every block of ``[0, end)``; else those that overlap
    ``[end - window + 1, end)``, and the one that `end` is inside of. After a commit of `end` tokens
    a running sequence holds no block before these.
    """
    first = 0 if window is None else max(0, end - window + 1) // tokens_per_block
    return range(first, -(-end // tokens_per_block))
