"""The source and target of each block of a copy, and the runs of bytes between both memories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.block_ids import (
    SMALL,
    BlockIds,
    Ids,
    check_integers,
    check_targets,
    host_ids,
    on_device,
    unpadded,
)
from kvconnect.kernels.blocks.buffers import byte_rows, check_devices
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import PlaneBytes, PlanePair, make_strips

Blocks: TypeAlias = PagedKv | Tensor
"""One side: paged memory, or uint8 ``[rows, nbytes]`` with a block in each contiguous row."""

Some: TypeAlias = npt.NDArray[np.bool_]
"""A selection among several pairs: True where a pair is selected."""

_ANY = 1 << 62


class Moves(NamedTuple):
    """The blocks to be copied: checked, without padding, at least one.

    Attributes:
        source, target: both sides; at least one is paged memory.
        source_ids, target_ids: ``[n]``: block ids, or row numbers for a buffer. On the device if
            the caller's ids were there: then ids out of range, -1 included, are skipped later.
        layers: the layers that are copied.
        table: the runs of those layers; with `num_tokens`, runs of whole tokens.
        num_tokens: ``[n]``, at least 1: how many first tokens of each block are copied; ``None``
            copies whole blocks.
        in_order: whether the row numbers of a buffer are 0 to n - 1.
    """

    source: Blocks
    target: Blocks
    source_ids: Ids | Tensor
    target_ids: Ids | Tensor
    layers: range
    table: RunTable
    num_tokens: Ids | None = None
    in_order: bool = False


def row_moves(
    kv: PagedKv, block_ids: BlockIds, buffer: Tensor, layers: range, *, gathers: bool
) -> Moves | None:
    """Returns the moves from blocks to rows of `buffer`, or back without `gathers`.

    Returns ``None`` if there is nothing to copy.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `gather_blocks` and `scatter_blocks`.
    """
    ids: Ids | Tensor
    positions: Ids | Tensor
    if on_device(block_ids):
        count, in_order = _count(kv, block_ids), True
        ids, positions = block_ids, torch.arange(count, device=kv.device)
    else:
        given = host_ids("block_ids", block_ids, kv.num_blocks)
        count = len(given)
        ids, positions, in_order = unpadded(given)
        if not gathers:
            check_targets("block_ids", ids)
    nbytes = kv.layers_nbytes(len(layers))
    rows = byte_rows("out" if gathers else "src", buffer, kv, count, nbytes)
    if not len(ids) or not nbytes:
        return None
    table = row_table(kv, layers, rows.stride(0) if count > 1 else nbytes, gathers=gathers)
    if gathers:
        return Moves(kv, rows, ids, positions, layers, table, None, in_order)
    return Moves(rows, kv, positions, ids, layers, table, None, in_order)


def _count(kv: PagedKv, block_ids: Tensor) -> int:
    """Returns the number of ids in `block_ids`, a tensor on the device. Its values are not read.

    Raises:
        TypeError, ValueError, RuntimeError: wrong dtype, shape or device.
    """
    if block_ids.device != kv.device:
        raise RuntimeError(f"block_ids: on {block_ids.device}, the cache is on {kv.device}")
    check_integers("block_ids", block_ids)
    if block_ids.ndim != 1:
        raise ConfigurationError(f"block_ids: shape {tuple(block_ids.shape)}; one axis is needed")
    return len(block_ids)


def split_mapping(mapping: Any) -> tuple[Ids, Ids, Some | None]:
    """Returns the sources and the targets of ``[n, 2]`` pairs, without padding.

    The third result selects the pairs that are not padding; ``None`` if there is no padding.

    Raises:
        TypeError: `mapping` has no integers.
        ValueError: `mapping` has another shape.
    """
    pairs = host_ids("block_mapping", mapping, _ANY, ndim=2)
    if pairs.shape[1] != 2:
        raise ConfigurationError(f"block_mapping: shape {pairs.shape}; [n, 2] is needed")
    sources, targets = pairs[:, 0], pairs[:, 1]
    if pairs.size <= SMALL:
        padded = any(low < 0 or high < 0 for low, high in pairs.tolist())
    else:
        padded = bool(pairs.min() < 0)
    if padded:
        some: Some = np.all(pairs >= 0, axis=1)
        return sources[some], targets[some], some
    return sources, targets, None


def pair_moves(
    kvs: tuple[PagedKv, PagedKv],
    ids: tuple[BlockIds, BlockIds],
    layers: range,
    *,
    num_tokens: BlockIds | None = None,
    some: Some | None = None,
) -> Moves | None:
    """Returns the moves from the first of `kvs` to the second; ``None`` if nothing is to be copied.

    Args:
        kvs: the source and the target.
        ids: the block ids of the source, and those of the target.
        layers: the layers to copy.
        num_tokens: how many first tokens of each block to copy; ``None`` copies whole blocks.
        some: the third result of `split_mapping`. `num_tokens` has an entry for each pair, padding
            included; `some` selects the entries of `ids`.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `copy_blocks`.
    """
    source, target = kvs
    partner = _partner(source, target)
    source_ids = host_ids("source_ids", ids[0], source.num_blocks, padding=False)
    target_ids = host_ids("target_ids", ids[1], target.num_blocks, padding=False)
    if len(source_ids) != len(target_ids):
        raise ConfigurationError(
            f"target_ids: {len(target_ids)} blocks for {len(source_ids)} sources"
        )
    counts = None
    if num_tokens is not None:
        length = len(source_ids) if some is None else len(some)
        counts = _token_counts(num_tokens, source.tokens, length)
        counts = counts if some is None else counts[some]
    check_targets("target_ids", target_ids)
    if partner.shift is not None:
        _check_apart(source_ids, target_ids + partner.shift if partner.shift else target_ids)
    if counts is not None:
        if (counts == source.tokens).all():
            counts = None
        elif not counts.all():
            copied = counts > 0
            source_ids, target_ids, counts = source_ids[copied], target_ids[copied], counts[copied]
    if not len(source_ids) or not layers:
        return None
    table = partner.table(source, target, layers, by_token=counts is not None)
    return Moves(source, target, source_ids, target_ids, layers, table, counts)


def _partner(source: PagedKv, target: PagedKv) -> Partner:
    known: Partner | None = source.partners.get(target)
    if known is not None:
        return known
    if source.dtype != target.dtype:
        raise TypeError(f"dst_kv: {target.dtype}, the source is {source.dtype}")
    if source.shape != target.shape:
        raise ConfigurationError(
            f"dst_kv: {target.described()}; the source is {source.described()} "
            "(copies do not change layouts)"
        )
    check_devices("dst_kv", source.device, target.device)
    made: Partner = source.partners.setdefault(target, Partner(source, target))
    return made


def _token_counts(num_tokens: BlockIds, tokens: int, count: int) -> Ids:
    try:
        counts = host_ids("num_tokens", num_tokens, tokens + 1, padding=False, noun="")
    except IndexError as error:
        raise ConfigurationError(str(error)) from error
    if len(counts) != count:
        raise ConfigurationError(f"num_tokens: {len(counts)} for {count} pairs")
    return counts


def _check_apart(source_ids: Ids, target_ids: Ids) -> None:
    """Checks that no target is a source: the result would depend on the order of the copies."""
    if len(target_ids) <= SMALL:
        both = set(source_ids.tolist()).intersection(target_ids.tolist())
    else:
        both = set(np.intersect1d(source_ids, target_ids).tolist())
    if both:
        raise ConfigurationError(f"target_ids: block {min(both)} is a source and a target")


def row_table(kv: PagedKv, layers: range, step: int, *, gathers: bool) -> RunTable:
    """Returns the runs of `layers` to a buffer whose blocks are `step` bytes apart, or from it.

    The table is kept in `kv`.
    """
    key = (gathers, layers.start, layers.stop, step)
    if (table := kv.tables.get(key)) is None:
        planes = kv.planes_of(layers)
        rows = _rows(kv, planes, step)
        table = _table(kv, planes, rows) if gathers else _table(kv, rows, planes)
        kv.tables[key] = table
    return table


class Partner:
    """The relation of a cache to another one that its blocks are copied to.

    Attributes:
        shift: block i of the target is block ``i + shift`` of the source; ``None`` if they share no
            block.
    """

    __slots__ = ("_tables", "shift")

    def __init__(self, source: PagedKv, target: PagedKv) -> None:
        self.shift = 0 if target is source else _shift(source, target)
        self._tables: dict[tuple[int, int, bool], RunTable] = {}

    def table(self, source: PagedKv, target: PagedKv, layers: range, *, by_token: bool) -> RunTable:
        """Returns the runs of `layers` from `source` to `target`; of whole tokens if `by_token`."""
        key = (layers.start, layers.stop, by_token)
        if (table := self._tables.get(key)) is None:
            planes = source.planes_of(layers), target.planes_of(layers)
            table = self._tables[key] = _table(source, *planes, by_token=by_token)
        return table


def _shift(source: PagedKv, target: PagedKv) -> int | None:
    distance, step = target.planes[0].offset - source.planes[0].offset, source.planes[0].block
    if not step or distance % step:
        return None
    for one, other in zip(source.planes, target.planes, strict=True):
        if replace(one, offset=one.offset + distance, memory=other.memory) != other:
            return None
    shift = distance // step
    return shift if -target.num_blocks < shift < source.num_blocks else None


def _rows(kv: PagedKv, planes: Sequence[PlaneBytes], step: int) -> list[PlaneBytes]:
    """Returns the locations that `planes` have in a contiguous buffer of blocks."""
    count, tokens_first = kv.tokens * kv.heads, kv.layout == "NHD"
    offsets = accumulate((count * plane.row for plane in planes), initial=0)
    return [
        PlaneBytes(
            offset=offset,
            block=step,
            token=plane.row * kv.heads if tokens_first else plane.row,
            head=plane.row if tokens_first else plane.row * kv.tokens,
            row=plane.row,
        )
        for plane, offset in zip(planes, offsets, strict=False)
    ]


def _table(
    kv: PagedKv,
    sources: Sequence[PlaneBytes],
    targets: Sequence[PlaneBytes],
    *,
    by_token: bool = False,
) -> RunTable:
    pairs = [PlanePair(*pair) for pair in zip(sources, targets, strict=True)]
    tokens_first = kv.layout == "NHD"
    return RunTable(
        make_strips(pairs, kv.tokens, kv.heads, tokens_first=tokens_first, by_token=by_token)
    )
