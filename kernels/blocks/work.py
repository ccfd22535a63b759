"""The checked work that a device carries out. Each record keeps its tensors alive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvconnect.kernels.blocks.block_ids import Ids
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.runs import RunTable


class End(NamedTuple):
    """A side of a copy of blocks.

    Attributes:
        address: the address that the offsets of runs count from.
        ids: ``[pairs]``, the blocks of this side. On the host they are valid. On the device they
            may be int32, and pairs with -1 or an id out of range are skipped.
        num_blocks: valid ids are below it.
        device: the device that the memory is on.
        pinned: whether the memory is page-locked host memory.
    """

    address: int
    ids: Ids | Tensor
    num_blocks: int
    device: torch.device
    pinned: bool


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """A copy of blocks, run by run.

    Run ``r`` of pair ``i`` goes from ``source.address + r.source_offset +
    source.ids[i] * r.source_step`` to ``target.address + r.target_offset +
    target.ids[i] * r.target_step``.

    Attributes:
        table: the runs. With `num_tokens`, each run has whole tokens of one plane.
        source, target: the side that is read, and the side that is written.
        num_tokens: ``[pairs]``; of run ``r`` only the first
            ``clamp(num_tokens[i] - r.first_token, 0, r.nbytes / r.token_nbytes)`` tokens are
            copied; ``None`` copies all.
        nbytes: the bytes of the whole copy.
        stable_source: whether the source is host memory that is complete before the call and
            unchanged until the `Transfer` is done, so that it may be read at once.
        keep: the objects that keep the memory alive.
    """

    table: RunTable
    source: End
    target: End
    num_tokens: Ids | None
    nbytes: int
    stable_source: bool
    keep: tuple[object, ...]

    def __len__(self) -> int:
        return len(self.source.ids)

    @property
    def on_host(self) -> bool:
        """Returns whether the ids of both sides are on the host."""
        return not isinstance(self.source.ids, Tensor) and not isinstance(self.target.ids, Tensor)

    def part(self, start: int, stop: int) -> BlockCopy:
        """Returns the copy of the pairs `start` to `stop` - 1 only."""
        return replace(
            self,
            source=self.source._replace(ids=self.source.ids[start:stop]),
            target=self.target._replace(ids=self.target.ids[start:stop]),
            num_tokens=None if self.num_tokens is None else self.num_tokens[start:stop],
        )


class UpdateWork(NamedTuple):
    """The work of a `kv_cache_update`.

    Attributes:
        cache: ``[batch, heads, max_length, row]``.
        update: ``[batch, heads, length, row]``, or packed ``[tokens, heads, row]``.
        write_indices: ``[batch]`` int32 or int64, on the device or the host. On the host they are
            valid. On the device, a sequence that does not fit is skipped, and counted in the error
            word.
        update_lengths: ``[batch + 1]`` cumulative for a packed update; ``None`` for a padded one.
    """

    cache: Tensor
    update: Tensor
    write_indices: Tensor
    update_lengths: Tensor | None = None


class AppendWork(NamedTuple):
    """The work of a `reshape_and_cache`.

    Attributes:
        states: the new keys, and the new values unless the cache has none:
            ``[tokens, heads, row]``.
        kv: the cache.
        layer: the layer that they are written to.
        slots: ``[tokens]`` int32 or int64, block times tokens per block plus token; -1 is skipped.
            On the host they are valid. On the device, slots out of range are skipped and counted.
    """

    states: tuple[Tensor, ...]
    kv: PagedKv
    layer: int
    slots: Tensor
