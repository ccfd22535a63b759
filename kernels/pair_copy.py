"""Copies from block to block, as pairs of ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvconnect.kernels.blocks.block_ids import BlockIds
from kvconnect.kernels.blocks.block_mapping import BlockPairs, Some, block_pairs
from kvconnect.kernels.blocks.buffers import check_path, layer_range
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.host import reference
from kvconnect.kernels.host.copy import copy_runs
from kvconnect.kernels.submit import is_host_work, submit_copy

__all__ = ["copy_pairs"]

_ALL = slice(None)


def copy_pairs(
    src_kv: PagedKv,
    dst_kv: PagedKv,
    source_ids: BlockIds,
    target_ids: BlockIds,
    num_tokens: BlockIds | None = None,
    *,
    some: Some | None = None,
    layers: slice | range = _ALL,
    stream: Any = None,
    path: str = "auto",
    stable_source: bool = False,
) -> Transfer:
    """`copy_blocks` with sources and targets apart, and no padding.

    Args:
        src_kv: as there.
        dst_kv: as there.
        source_ids: ``[n]`` on the host.
        target_ids: as many.
        num_tokens: as there.
        some: which of `num_tokens` belong to these pairs, where padding was left out.
        layers: as there.
        stream: as there.
        path: as there.
        stable_source: as there.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as there.
    """
    check_path(path)
    numbers = layers if isinstance(layers, range) else layer_range(src_kv, layers)
    pairs = block_pairs(src_kv, dst_kv, source_ids, target_ids, num_tokens, some)
    if not len(pairs.sources) or not numbers:
        return DONE
    table = src_kv.copy_table(
        dst_kv, numbers.start, numbers.stop, by_token=pairs.num_tokens is not None
    )
    if path == "auto" and is_host_work(src_kv.device, dst_kv.device):
        _copy_on_host(src_kv, dst_kv, table, pairs)
        return DONE

    def plainly() -> None:
        reference.copy(
            src_kv.layer_views(numbers),
            dst_kv.layer_views(numbers),
            list(zip(pairs.sources.tolist(), pairs.targets.tolist(), strict=True)),
            None if pairs.num_tokens is None else pairs.num_tokens.tolist(),
            token_axis=0 if src_kv.layout == "NHD" else 1,
        )

    copy = _work(src_kv, dst_kv, table, pairs, stable=stable_source)
    return submit_copy(copy, stream, path, plainly)


def _copy_on_host(src_kv: PagedKv, dst_kv: PagedKv, table: RunTable, pairs: BlockPairs) -> None:
    sources, targets, counts = pairs.sources, pairs.targets, pairs.num_tokens
    if counts is None:
        copy_runs(table, src_kv, dst_kv, sources, targets, in_order=False)
        return
    for count in np.unique(counts).tolist():
        some = counts == count
        part = table.prefix(count)
        copy_runs(part, src_kv, dst_kv, sources[some], targets[some], in_order=False)


def _work(
    src_kv: PagedKv, dst_kv: PagedKv, table: RunTable, pairs: BlockPairs, *, stable: bool
) -> BlockCopy:
    counts, tokens = pairs.num_tokens, src_kv.tokens
    total = len(pairs.sources) * tokens if counts is None else int(counts.sum())
    return BlockCopy(
        table=table,
        source=0,
        target=0,
        source_ids=pairs.sources,
        target_ids=pairs.targets,
        num_tokens=counts,
        nbytes=table.nbytes // tokens * total,
        source_device=src_kv.device,
        target_device=dst_kv.device,
        source_pinned=src_kv.pinned,
        target_pinned=dst_kv.pinned,
        source_limit=src_kv.num_blocks,
        target_limit=dst_kv.num_blocks,
        stable_source=stable,
        keep=(src_kv, dst_kv, pairs),
    )
