"""The copies of pools in host memory whose rows are not contiguous, such as vLLM's on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from kvconnect.connector.io.copiers import PoolCopier
from kvconnect.connector.io.staging import StagingPool
from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.layout import KvCacheLayout

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        """The device of the planes: the CPU."""
        return self.views[0].device


class HostCopier(PoolCopier):
    """A `PoolCopier` for a pool in host memory; copies into it are those of `_HostPlanes`.

    Args:
        blocks: the pool, as planes of `layout`.
        layout: the layout of its blocks.
        staging: the slots.
    """

    def __init__(self, blocks: PagedKv, layout: KvCacheLayout, staging: StagingPool) -> None:
        super().__init__(blocks, layout, staging)
        self._host = _HostPlanes(blocks.views, self._slots.views)

    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies each slot's payload to its block."""
        self._host.copy_in(slots, block_ids)


class StridedCopier(HostCopier):
    """A copier for `StridedPlanes`: every copy is over when its method returns."""

    def __init__(self, blocks: StridedPlanes, layout: KvCacheLayout, staging: StagingPool) -> None:
        self._begin(layout, staging, blocks.device)
        self._planes = tuple(view.detach() for view in blocks.views)
        self._host = _HostPlanes(self._planes, self._slots.views)

    @torch.inference_mode()
    def copy_out(
        self, block_ids: Sequence[int], slots: Sequence[int], stream: torch.cuda.Stream | None
    ) -> Transfer:
        """Copies blocks to slots."""
        blocks, rooms = _numbers(block_ids), _numbers(slots)
        for plane, slot in zip(self._planes, self._slots.views, strict=True):
            slot.index_copy_(0, rooms, plane.index_select(0, blocks))
        return DONE


@dataclass(frozen=True, slots=True, eq=False)
class _Planes:
    """The planes ``[planes, blocks, T, heads, dim]`` of the pool, and those of the slots."""

    pool: NDArray[np.generic]
    slots: NDArray[np.generic]


class _HostPlanes:
    """Copies into a pool in host memory by NumPy, on the calling thread alone.

    torch would wake the threads that the engine computes with for each plane, and wait until they
    run. Between two planes the calling thread would wait for the interpreter's lock. So planes at
    equal distances, on both sides, are copied as one.

    Args:
        pool: planes ``[blocks, T, heads, dim]``, layer by layer.
        slots: the same planes of the staging memory.
    """

    def __init__(self, pool: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        self._planes = _joined(
            [
                _Planes(_words(one)[None], _words(other)[None])
                for one, other in zip(pool, slots, strict=True)
            ]
        )
        self._num_blocks = len(pool[0])

    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies each slot's payload to its block; the copies are over when it returns.

        Raises:
            IndexError: a block is not in the pool; no block was copied.
        """
        targets = np.array(block_ids, np.intp)
        if len(targets) and not 0 <= targets.min() <= targets.max() < self._num_blocks:
            raise IndexError(f"block_ids: {list(block_ids)} are not all of the pool")
        runs = list(_runs(slots))
        for pair in self._planes:
            for some, rooms in runs:
                pair.pool[:, targets[some]] = pair.slots[:, rooms]


def _joined(pairs: Sequence[_Planes]) -> list[_Planes]:
    """Returns `pairs`, with planes of one shape at equal distances joined into one."""
    groups: dict[tuple[object, ...], list[_Planes]] = {}
    for pair in pairs:
        sides = pair.pool, pair.slots
        groups.setdefault(tuple((one.shape, one.strides) for one in sides), []).append(pair)
    joined: list[_Planes] = []
    for group in groups.values():
        pools, slots = ([one.pool for one in group], [one.slots for one in group])
        steps = _step(pools), _step(slots)
        if steps[0] is None or steps[1] is None:
            joined += group
        else:
            joined.append(_Planes(_as_one(pools, steps[0]), _as_one(slots, steps[1])))
    return joined


def _step(planes: Sequence[NDArray[np.generic]]) -> int | None:
    """Returns the distance in bytes from each plane to the next; ``None`` if distances differ."""
    starts = [plane.ctypes.data for plane in planes]
    steps = {after - before for before, after in pairwise(starts)}
    return steps.pop() if len(steps) == 1 else None


def _as_one(planes: Sequence[NDArray[np.generic]], step: int) -> NDArray[np.generic]:
    """Returns one array of all `planes`, whose memory the caller keeps alive."""
    first = planes[0]
    return as_strided(first, (len(planes), *first.shape[1:]), (step, *first.strides[1:]))


def _numbers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _words(view: Tensor) -> NDArray[np.generic]:
    """Returns `view` as a NumPy array of integers of the same size."""
    words: NDArray[np.generic] = view.detach().view(_WORDS[view.element_size()]).numpy()
    return words


def _runs(numbers: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yields runs of `numbers` with equal distances: their positions and values, as slices."""
    start = 0
    while start < len(numbers):
        stop = start + 1
        step = numbers[stop] - numbers[start] if stop < len(numbers) else 1
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        last = numbers[stop - 1] + step
        yield slice(start, stop), slice(numbers[start], None if last < 0 else last, step)
        start = stop
