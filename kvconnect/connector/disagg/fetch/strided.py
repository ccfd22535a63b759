"""The byte offsets that copy a rank's blocks into blocks of another shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnect.layout import KvCacheLayout
from kvconnect.transfer.reads import Offsets, Reads


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The consecutive blocks of one request on one side.

    Attributes:
        region: number of the pool that they are in, at that side's transport.
        layout: the layout of the pool.
        heads: the KV heads to copy, as many as on the other side.
        first: number of the first block within the request, of ``layout.tokens_per_block`` tokens.
        ids: the ids of the blocks from `first` on.
    """

    region: int
    layout: KvCacheLayout
    heads: slice
    first: int
    ids: Sequence[int]

    @property
    def is_whole(self) -> bool:
        """Returns whether `heads` are all heads of the blocks."""
        return self.heads == slice(0, self.layout.num_kv_heads)


@dataclass(frozen=True, slots=True)
class _Plane:
    """The keys, or the values, or both if their rows have the same width.

    Attributes:
        dim: elements of a head's row.
        offset: elements before the first row within a layer.
        count: planes of a layer that follow each other.
    """

    dim: int
    offset: int
    count: int


def strided_reads(
    remote: BlockRun, local: BlockRun, *, tokens: range, layers: range, exact: bool = False
) -> list[Reads]:
    """Returns reads that copy `tokens` of `layers` from `remote` to `local`, each byte once.

    The two differ in tokens_per_block, in which heads they hold, or in both; other fields of their
    layouts are equal. Where the heads are all of both sides, a piece is one layer's keys, or
    values, of as many tokens as the smaller block has; else those of one token's common heads.
    Bytes behind the last token in such a piece are read, too. Pieces that follow each other on both
    sides are neighbours in the arrays.

    Args:
        remote: the source blocks.
        local: the target blocks.
        tokens: the tokens of the request, within both runs; beginning at a multiple of both block
            sizes' smaller one.
        layers: indices within the pool group.
        exact: reads token by token, so that no bytes behind the last token are read.
    """
    if not tokens or not layers:
        return []
    unit = 1
    if remote.is_whole and local.is_whole and not exact:
        unit = min(remote.layout.tokens_per_block, local.layout.tokens_per_block)
    begins = np.arange(tokens.start, tokens.stop, unit, dtype=np.int64)
    size = local.layout.dtype.itemsize
    heads = local.heads.stop - local.heads.start
    return [
        Reads(
            remote_region=remote.region,
            remote_offsets=_offsets(remote, far, begins, layers),
            local_region=local.region,
            local_offsets=_offsets(local, near, begins, layers),
            nbytes=unit * heads * near.dim * size,
        )
        for far, near in zip(_planes(remote.layout), _planes(local.layout), strict=True)
    ]


def _planes(layout: KvCacheLayout) -> Iterator[_Plane]:
    if layout.kv_factor == 2:
        yield _Plane(layout.key_dim, 0, 2)
        return
    yield _Plane(layout.key_dim, 0, 1)
    if layout.value_dim:
        rows = layout.tokens_per_block * layout.num_kv_heads
        yield _Plane(layout.value_dim, rows * layout.key_dim, 1)


def _offsets(run: BlockRun, plane: _Plane, begins: npt.NDArray[np.int64], layers: range) -> Offsets:
    """Returns the offsets of the pieces at the tokens `begins`, layer by layer, plane by plane."""
    layout, size = run.layout, run.layout.dtype.itemsize
    numbers, within = np.divmod(begins, layout.tokens_per_block)
    ids = np.asarray(run.ids, np.int64)
    row = layout.num_kv_heads * plane.dim
    tokens = ids[numbers - run.first] * layout.block_nbytes
    tokens += (within * row + run.heads.start * plane.dim + plane.offset) * size
    layer = np.arange(layers.start, layers.stop, dtype=np.int64) * layout.layer_nbytes
    each = np.arange(plane.count, dtype=np.int64) * (layout.plane_elements * size)
    planes = (layer[:, None] + each[None, :]).reshape(-1)
    found: Offsets = (planes[:, None] + tokens[None, :]).reshape(-1)
    return found
