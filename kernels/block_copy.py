"""Carries out copies of blocks: by the host's own loops, on a device, or in plain torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from kvconnect.kernels.blocks.block_ids import BlockIds, Ids
from kvconnect.kernels.blocks.buffers import check_path, layer_range
from kvconnect.kernels.blocks.moves import Blocks, Moves, pair_moves
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.blocks.work import BlockCopy, End
from kvconnect.kernels.cuda import device
from kvconnect.kernels.host import reference
from kvconnect.kernels.host.copy import copy_moves

_ALL = slice(None)
_HOST = torch.device("cpu")


def copy_pairs(
    src_kv: PagedKv,
    dst_kv: PagedKv,
    source_ids: BlockIds,
    target_ids: BlockIds,
    num_tokens: BlockIds | None = None,
    *,
    layers: slice | range = _ALL,
    stream: Any = None,
    path: str = "auto",
    stable_source: bool = False,
) -> Transfer:
    """Copies blocks like `copy_blocks`, with separate sources and targets, and no padding.

    Args:
        src_kv: as for `copy_blocks`.
        dst_kv: as for `copy_blocks`.
        source_ids: ``[n]`` on the host: the blocks to read.
        target_ids: ``[n]`` on the host: the blocks to write, in the same order.
        num_tokens: as for `copy_blocks`.
        layers: as for `copy_blocks`.
        stream: as for `copy_blocks`.
        path: as for `copy_blocks`.
        stable_source: as for `copy_blocks`.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `copy_blocks`.
    """
    numbers = layer_range(src_kv, layers)
    moves = pair_moves((src_kv, dst_kv), (source_ids, target_ids), numbers, num_tokens=num_tokens)
    return move_blocks(moves, stream, path, stable_source=stable_source)


def move_blocks(
    moves: Moves | None, stream: Any, path: str, *, stable_source: bool = False
) -> Transfer:
    """Copies the blocks of `moves`; ``None`` copies nothing.

    Args:
        moves: the checked copy.
        stream: the stream of a copy on a device; ``None`` is the current one. Ignored on the host.
        path: one of `PATHS`.
        stable_source: as for `scatter_blocks`.

    Raises:
        ValueError: there is no such path.
        RuntimeError: there is no device for `path`.
    """
    check_path(path)
    if moves is None:
        return DONE
    where, other = moves.source.device, moves.target.device
    if path == "auto" and where == other == _HOST and not device.wanted(where):
        copy_moves(moves)
        return DONE
    if where.type != "cuda":
        where = other
    if path == "torch":
        return _move_plainly(moves, where, stream)

    def submit(work: device.DeviceWork) -> Transfer:
        return work.copy(_block_copy(moves, stable_source=stable_source), stream, path)

    if path != "auto":
        return submit(device.device_work(where))
    return device.tried(where, submit) or _move_plainly(moves, where, stream)


def _block_copy(moves: Moves, *, stable_source: bool) -> BlockCopy:
    nbytes, counts = len(moves.source_ids) * moves.table.nbytes, moves.num_tokens
    if counts is not None:
        nbytes = moves.table.nbytes // cast("PagedKv", moves.source).tokens * int(counts.sum())
    return BlockCopy(
        table=moves.table,
        source=_end(moves.source, moves.source_ids),
        target=_end(moves.target, moves.target_ids),
        num_tokens=counts,
        nbytes=nbytes,
        stable_source=stable_source,
        keep=moves,
    )


def _end(blocks: Blocks, ids: Ids | Tensor) -> End:
    if isinstance(blocks, PagedKv):
        return End(0, ids, blocks.num_blocks, blocks.device, blocks.pinned)
    pinned = blocks.is_cpu and torch.cuda.is_available() and blocks.is_pinned()
    return End(blocks.data_ptr(), ids, len(blocks), blocks.device, pinned)


def _move_plainly(moves: Moves, where: torch.device, stream: Any) -> Transfer:
    if where.type != "cuda":
        _move_by_torch(moves)
        return DONE
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        _move_by_torch(moves)
        event = torch.cuda.current_stream(where).record_event()
    return Transfer(event, moves)


def _move_by_torch(moves: Moves) -> None:
    source, target, layers = moves.source, moves.target, moves.layers
    source_ids, target_ids = moves.source_ids.tolist(), moves.target_ids.tolist()
    if isinstance(source, PagedKv) and isinstance(target, PagedKv):
        reference.copy(
            source.layer_views(layers),
            target.layer_views(layers),
            list(zip(source_ids, target_ids, strict=True)),
            None if moves.num_tokens is None else moves.num_tokens.tolist(),
            token_axis=0 if source.layout == "NHD" else 1,
        )
    elif isinstance(source, PagedKv):
        ids = _by_row(source_ids, target_ids)
        reference.gather(source.layer_views(layers), ids, cast("Tensor", target))
    else:
        ids = _by_row(target_ids, source_ids)
        reference.scatter(source, cast("PagedKv", target).layer_views(layers), ids)


def _by_row(ids: list[int], rows: list[int]) -> list[int]:
    found = [-1] * (max(rows) + 1)
    for block_id, row in zip(ids, rows, strict=True):
        found[row] = block_id
    return found
