"""Copies between paged blocks and the rows of a contiguous buffer, in both directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.block_ids import (
    BlockIds,
    Ids,
    check_integers,
    check_targets,
    host_ids,
    kept,
    on_device,
)
from kvconnect.kernels.blocks.buffers import byte_rows, check_path
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.host import reference
from kvconnect.kernels.host.copy import copy_runs
from kvconnect.kernels.submit import is_host_work, submit_copy

__all__ = ["copy_rows"]


def copy_rows(
    kv: PagedKv,
    block_ids: BlockIds,
    name: str,
    buffer: Tensor,
    layers: range,
    stream: Any,
    path: str,
    *,
    gathers: bool,
    stable: bool = False,
) -> Transfer:
    """`gather_blocks`, or `scatter_blocks`, with `buffer` called `name` in messages."""
    check_path(path)
    if on_device(block_ids):
        return _copy_unseen(kv, block_ids, name, buffer, layers, stream, path, gathers=gathers)
    ids = host_ids("block_ids", block_ids, kv.num_blocks)
    nbytes = kv.layers_nbytes(len(layers))
    rows = byte_rows(name, buffer, kv, len(ids), nbytes)
    placed = kept(ids)
    if not gathers:
        check_targets("block_ids", placed.ids)
    if not len(placed.ids) or not nbytes:
        return DONE
    step = rows.stride(0) if len(ids) > 1 else nbytes
    make = kv.gather_table if gathers else kv.scatter_table
    table = make(layers.start, layers.stop, step)
    source, target = (kv, rows) if gathers else (rows, kv)
    from_ids, to_ids = (placed.ids, placed.places) if gathers else (placed.places, placed.ids)
    if path == "auto" and is_host_work(kv.device, rows.device):
        copy_runs(table, source, target, from_ids, to_ids, in_order=placed.in_order)
        return DONE
    copy = _rows_copy(
        kv, rows, table, from_ids, to_ids, gathers=gathers, stable=stable, count=len(placed.ids)
    )

    def plainly() -> None:
        if gathers:
            reference.gather(kv.layer_views(layers), ids.tolist(), rows)
        else:
            reference.scatter(rows, kv.layer_views(layers), ids.tolist())

    return submit_copy(copy, stream, path, plainly)


def _copy_unseen(
    kv: PagedKv,
    block_ids: Any,
    name: str,
    buffer: Tensor,
    layers: range,
    stream: Any,
    path: str,
    *,
    gathers: bool,
) -> Transfer:
    """With ids on the device: nobody looks at them but the kernel, which skips what is wrong."""
    if block_ids.device != kv.device:
        raise RuntimeError(f"block_ids: on {block_ids.device}, the cache is on {kv.device}")
    check_integers("block_ids", block_ids)
    if block_ids.ndim != 1:
        raise ConfigurationError(f"block_ids: shape {tuple(block_ids.shape)}; one axis is needed")
    count, nbytes = len(block_ids), kv.layers_nbytes(len(layers))
    rows = byte_rows(name, buffer, kv, count, nbytes)
    if not count or not nbytes:
        return DONE
    make = kv.gather_table if gathers else kv.scatter_table
    table = make(layers.start, layers.stop, rows.stride(0) if count > 1 else nbytes)
    places = torch.arange(count, device=kv.device)
    from_ids, to_ids = (block_ids, places) if gathers else (places, block_ids)
    copy = _rows_copy(kv, rows, table, from_ids, to_ids, gathers=gathers, stable=False, count=count)

    def plainly() -> None:
        ids = block_ids.tolist()
        if gathers:
            reference.gather(kv.layer_views(layers), ids, rows)
        else:
            reference.scatter(rows, kv.layer_views(layers), ids)

    return submit_copy(copy, stream, path, plainly)


def _rows_copy(
    kv: PagedKv,
    rows: Tensor,
    table: RunTable,
    from_ids: Ids | Tensor,
    to_ids: Ids | Tensor,
    *,
    gathers: bool,
    stable: bool,
    count: int,
) -> BlockCopy:
    pinned = rows.is_cpu and torch.cuda.is_available() and rows.is_pinned()
    return BlockCopy(
        table=table,
        source=0 if gathers else rows.data_ptr(),
        target=rows.data_ptr() if gathers else 0,
        source_ids=from_ids,
        target_ids=to_ids,
        num_tokens=None,
        nbytes=count * table.nbytes,
        source_device=kv.device if gathers else rows.device,
        target_device=rows.device if gathers else kv.device,
        source_pinned=kv.pinned if gathers else pinned,
        target_pinned=pinned if gathers else kv.pinned,
        source_limit=kv.num_blocks if gathers else len(rows),
        target_limit=len(rows) if gathers else kv.num_blocks,
        stable_source=stable,
        keep=(kv, rows, from_ids, to_ids),
    )
