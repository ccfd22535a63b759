"""Pools whose rows are not contiguous, as engines on the CPU hold their keys: copied by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvconnect.connector.offload.staging import PoolCopier, Slot, StagingPool
from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.layout import KvCacheLayout

__all__ = ["StridedCopier", "StridedPlanes"]


@dataclass(frozen=True, slots=True, eq=False)
class StridedPlanes:
    """The planes of a pool in host memory, of any strides.

    Attributes:
        views: ``[num_blocks, T, heads, dim]``, layer by layer, keys before values.
        per_layer: planes of a layer: 2, or 1 without values.
    """

    views: tuple[Tensor, ...]
    per_layer: int = 2

    def __post_init__(self) -> None:
        for number, view in enumerate(self.views):
            if view.device.type != "cpu":
                raise ConfigurationError(
                    f"views[{number}]: on {view.device}; rows that are not contiguous are copied "
                    "in host memory only"
                )

    @property
    def device(self) -> torch.device:
        """Where the planes are."""
        return self.views[0].device


class StridedCopier(PoolCopier):
    """As `PoolCopier`, for `StridedPlanes`: every copy is over when its method returns."""

    def __init__(self, blocks: StridedPlanes, layout: KvCacheLayout, staging: StagingPool) -> None:
        self.layout = layout
        self._planes = tuple(view.detach() for view in blocks.views)
        self._per_layer = blocks.per_layer
        self._slots = staging.paged(layout)
        self._in = None
        self._out = None

    @torch.inference_mode()
    def copy_out(
        self, block_ids: Sequence[int], slots: Sequence[Slot], stream: torch.cuda.Stream | None
    ) -> Transfer:
        """Blocks to slots."""
        blocks, rooms = _numbers(block_ids), _numbers([slot.index for slot in slots])
        for plane, slot in zip(self._planes, self._slots.views, strict=True):
            slot.index_copy_(0, rooms, plane.index_select(0, blocks))
        return DONE

    @torch.inference_mode()
    def copy_in(
        self, slots: Sequence[Slot], block_ids: Sequence[int], layers: range | None = None
    ) -> None:
        """Each slot's payload, or only `layers` of it, to its block."""
        blocks, rooms = _numbers(block_ids), _numbers([slot.index for slot in slots])
        numbers = range(len(self._planes) // self._per_layer) if layers is None else layers
        chosen = slice(numbers.start * self._per_layer, numbers.stop * self._per_layer)
        for plane, slot in zip(self._planes[chosen], self._slots.views[chosen], strict=True):
            plane.index_copy_(0, blocks, slot.index_select(0, rooms))


def _numbers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
