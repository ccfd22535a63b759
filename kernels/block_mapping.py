"""Which block goes where: pairs of blocks and numbers of tokens, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.block_ids import BlockIds, check_targets, host_ids
from kvconnect.kernels.buffers import check_devices
from kvconnect.kernels.paged import PagedKv
from kvconnect.kernels.work import Ids

__all__ = ["BlockPairs", "block_pairs"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Pairs without padding, and without those of which no token is copied.

    Attributes:
        sources, targets: ``[n]`` block ids.
        num_tokens: ``[n]``, at least 1; ``None``: whole blocks.
    """

    sources: Ids
    targets: Ids
    num_tokens: Ids | None


def block_pairs(
    src_kv: PagedKv, dst_kv: PagedKv, mapping: Any, num_tokens: BlockIds | None
) -> BlockPairs:
    """What `copy_blocks` is asked for. Raises as it does."""
    _check_pair(src_kv, dst_kv)
    limit = max(src_kv.num_blocks, dst_kv.num_blocks)
    pairs = host_ids("block_mapping", mapping, limit, ndim=2)
    if pairs.shape[1] != 2:
        raise ConfigurationError(f"block_mapping: shape {pairs.shape}; [n, 2] is needed")
    sources, targets = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    for name, ids, kv in (("source", sources, src_kv), ("target", targets, dst_kv)):
        if kv.num_blocks < limit and len(ids) and ids.max() >= kv.num_blocks:
            raise IndexError(
                f"block_mapping: {name} {ids.max()} is outside 0..{kv.num_blocks - 1}"
            )
    counts = None if num_tokens is None else _token_counts(num_tokens, src_kv.tokens, len(pairs))
    padding = (pairs < 0).any(axis=1) if len(pairs) and pairs.min() < 0 else None
    if padding is not None:
        sources, targets = sources[~padding], targets[~padding]
        counts = None if counts is None else counts[~padding]
    check_targets("block_mapping", targets)
    _check_apart(src_kv, dst_kv, sources, targets)
    if counts is not None:
        if (counts == src_kv.tokens).all():
            counts = None
        elif not counts.all():
            some = counts > 0
            sources, targets, counts = sources[some], targets[some], counts[some]
    return BlockPairs(sources, targets, counts)


def _token_counts(num_tokens: BlockIds, tokens: int, count: int) -> Ids:
    try:
        counts = host_ids("num_tokens", num_tokens, tokens + 1, padding=False)
    except IndexError as error:
        raise ConfigurationError(str(error)) from error
    if len(counts) != count:
        raise ConfigurationError(f"num_tokens: {len(counts)} for {count} pairs")
    return counts


def _check_apart(src_kv: PagedKv, dst_kv: PagedKv, sources: Ids, targets: Ids) -> None:
    """No target is a source: which of both copies came first would decide what it holds."""
    shift = src_kv.shift_to(dst_kv)
    if shift is None:
        return
    both = np.intersect1d(sources, targets + shift)
    if both.size:
        raise ConfigurationError(f"block_mapping: block {both[0]} is a source and a target")


def _check_pair(src_kv: PagedKv, dst_kv: PagedKv) -> None:
    if src_kv.dtype != dst_kv.dtype:
        raise TypeError(f"dst_kv: {dst_kv.dtype}, the source is {src_kv.dtype}")
    if src_kv.shape != dst_kv.shape:
        raise ConfigurationError(
            f"dst_kv: {dst_kv.described()}; the source is {src_kv.described()} "
            "(transpose_blocks changes layouts)"
        )
    check_devices("dst_kv", src_kv.device, dst_kv.device)
