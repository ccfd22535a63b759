"""Which block goes where: pairs of blocks and numbers of tokens, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.block_ids import BlockIds, Ids, check_targets, host_ids
from kvconnect.kernels.blocks.buffers import check_devices
from kvconnect.kernels.blocks.paged import PagedKv

__all__ = ["BlockPairs", "Some", "block_pairs", "split_mapping"]

Some: TypeAlias = npt.NDArray[np.bool_]
"""Which of several pairs."""

_SMALL = 64
_ANY = 1 << 62


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


def split_mapping(mapping: Any) -> tuple[Ids, Ids, Some | None]:
    """Sources and targets of ``[n, 2]`` pairs, and which pairs were no padding (``None``: all).

    Raises:
        TypeError: they are no integers.
        ValueError: of another shape.
    """
    pairs = host_ids("block_mapping", mapping, _ANY, ndim=2)
    if pairs.shape[1] != 2:
        raise ConfigurationError(f"block_mapping: shape {pairs.shape}; [n, 2] is needed")
    sources, targets = pairs[:, 0], pairs[:, 1]
    if pairs.size <= _SMALL:
        padded = any(low < 0 or high < 0 for low, high in pairs.tolist())
    else:
        padded = bool(pairs.min() < 0)
    if padded:
        some: Some = np.all(pairs >= 0, axis=1)
        return sources[some], targets[some], some
    return sources, targets, None


def block_pairs(
    src_kv: PagedKv,
    dst_kv: PagedKv,
    source_ids: BlockIds,
    target_ids: BlockIds,
    num_tokens: BlockIds | None,
    some: Some | None,
) -> BlockPairs:
    """What `copy_pairs` is asked for. Raises as it does."""
    _check_alike(src_kv, dst_kv)
    sources = host_ids("source_ids", source_ids, src_kv.num_blocks, padding=False)
    targets = host_ids("target_ids", target_ids, dst_kv.num_blocks, padding=False)
    if len(sources) != len(targets):
        raise ConfigurationError(f"target_ids: {len(targets)} blocks for {len(sources)} sources")
    counts = None
    if num_tokens is not None:
        length = len(sources) if some is None else len(some)
        counts = _token_counts(num_tokens, src_kv.tokens, length)
        counts = counts if some is None else counts[some]
    check_targets("target_ids", targets)
    _check_apart(src_kv, dst_kv, sources, targets)
    if counts is not None:
        if (counts == src_kv.tokens).all():
            counts = None
        elif not counts.all():
            copied = counts > 0
            sources, targets, counts = sources[copied], targets[copied], counts[copied]
    return BlockPairs(sources, targets, counts)


def _check_alike(src_kv: PagedKv, dst_kv: PagedKv) -> None:
    if src_kv is dst_kv or src_kv.knows(dst_kv):
        return
    if src_kv.dtype != dst_kv.dtype:
        raise TypeError(f"dst_kv: {dst_kv.dtype}, the source is {src_kv.dtype}")
    if src_kv.shape != dst_kv.shape:
        raise ConfigurationError(
            f"dst_kv: {dst_kv.described()}; the source is {src_kv.described()} "
            "(transpose_blocks changes layouts)"
        )
    check_devices("dst_kv", src_kv.device, dst_kv.device)


def _token_counts(num_tokens: BlockIds, tokens: int, count: int) -> Ids:
    try:
        counts = host_ids("num_tokens", num_tokens, tokens + 1, padding=False, noun="")
    except IndexError as error:
        raise ConfigurationError(str(error)) from error
    if len(counts) != count:
        raise ConfigurationError(f"num_tokens: {len(counts)} for {count} pairs")
    return counts


def _check_apart(src_kv: PagedKv, dst_kv: PagedKv, sources: Ids, targets: Ids) -> None:
    """No target is a source: which of both copies came first would decide what it holds."""
    shift = src_kv.partner(dst_kv).shift
    if shift is None:
        return
    moved = targets if not shift else targets + shift
    if len(moved) <= _SMALL:
        both = set(sources.tolist()).intersection(moved.tolist())
    else:
        both = set(np.intersect1d(sources, moved).tolist())
    if both:
        raise ConfigurationError(f"target_ids: block {min(both)} is a source and a target")
