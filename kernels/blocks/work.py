"""The checked work for a device; it keeps its tensors alive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvconnect.kernels.blocks.block_ids import Ids
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.runs import RunTable

__all__ = ["AppendWork", "BlockCopy", "End", "UpdateWork"]


class End(NamedTuple):
    """A side of a copy of blocks.

    Attributes:
        address: that the offsets of runs count from.
        ids: ``[pairs]``, its blocks, in range and without padding; on the device also int32, and
            out of range or -1: those pairs are skipped.
        num_blocks: ids are below it.
        device: where the memory is.
        pinned: whether it is page-locked host memory.
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
        table: the runs. With `num_tokens` they are whole tokens, of one plane each.
        source, target: where to read, and where to write.
        num_tokens: ``[pairs]``; of run ``r`` the first
            ``clamp(num_tokens[i] - r.first_token, 0, r.nbytes / r.token_nbytes)`` tokens;
            ``None``: all.
        nbytes: what is copied in all.
        stable_source: the host wrote the source before the call and leaves it alone until the
            `Transfer` is done, so that it may be read at once.
        keep: what keeps the memory alive.
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
        """Returns whether the ids are on the host."""
        return not isinstance(self.source.ids, Tensor) and not isinstance(self.target.ids, Tensor)

    def part(self, start: int, stop: int) -> BlockCopy:
        """Returns the copy of the pairs from `start` to before `stop`."""
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
            valid; on the device they are clamped and counted in the error word.
        update_lengths: ``[batch + 1]`` cumulative, where the update is packed.
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
            On the host they are valid; on the device others are skipped and counted.
    """

    states: tuple[Tensor, ...]
    kv: PagedKv
    layer: int
    slots: Tensor
