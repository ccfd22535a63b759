"""The registered memory: peers may read it, and reads write to it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvconnect.errors import ConfigurationError, PullFailed
from kvconnect.transfer.reads import Offsets, Reads

if TYPE_CHECKING:
    from torch import Tensor

MAX_REGIONS = 4096


@dataclass(frozen=True, slots=True)
class Region:
    """A registered memory.

    Attributes:
        bytes: uint8[nbytes], a view; keeps the memory alive.
        host: whether it is memory of the CPU, which sockets can read and write.
    """

    bytes: Tensor
    host: bool

    @property
    def nbytes(self) -> int:
        """The size of the memory in bytes."""
        return self.bytes.numel()

    @property
    def address(self) -> int:
        """The address of the first byte, in this process or on its device."""
        return self.bytes.data_ptr()

    @property
    def device(self) -> int:
        """The number of the device among those of its kind."""
        return self.bytes.device.index or 0

    def view(self) -> memoryview:
        """Returns the bytes of host memory, without a copy."""
        return self.bytes.numpy().data


class Regions:
    """The registered memory by number. Thread-safe; regions stay until `clear`."""

    def __init__(self) -> None:
        self._regions: tuple[Region, ...] = ()
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Region:
        return self._regions[number]

    def all(self) -> tuple[Region, ...]:
        """Returns all regions; the index is the region's number."""
        return self._regions

    def sizes(self) -> tuple[int, ...]:
        """Returns the bytes of each region."""
        return tuple(region.nbytes for region in self._regions)

    def add(self, memory: Tensor) -> int:
        """Keeps `memory` and returns its number.

        Raises:
            ConfigurationError: `memory` is empty or not contiguous, or `MAX_REGIONS` are kept.
        """
        import torch  # seconds

        if not memory.is_contiguous() or not memory.numel():
            raise ConfigurationError(
                f"memory has shape {tuple(memory.shape)} and strides {memory.stride()}:"
                " only contiguous memory of at least one byte can be registered"
            )
        flat = memory.detach().reshape(-1).view(torch.uint8)
        region = Region(flat, host=memory.device.type == "cpu")
        with self._lock:
            if len(self._regions) == MAX_REGIONS:
                raise ConfigurationError(f"{MAX_REGIONS} regions are registered: no more can be")
            self._regions = (*self._regions, region)
            return len(self._regions) - 1

    def remove_last(self) -> None:
        """Forgets the region that was added last."""
        with self._lock:
            self._regions = self._regions[:-1]

    def clear(self) -> None:
        """Forgets all regions."""
        with self._lock:
            self._regions = ()


def require_local(regions: Regions, reads: Reads, deadline_s: float) -> None:
    """Checks the local side of the arguments of `Transport.pull`.

    Raises:
        ConfigurationError: a destination is outside of `regions`, or `deadline_s` is not positive.
    """
    if not deadline_s > 0:
        raise ConfigurationError(f"deadline_s={deadline_s}: must be > 0")
    wrong = outside(regions.sizes(), reads.local_region, reads.local_offsets, reads.nbytes)
    if wrong is not None:
        raise ConfigurationError(f"local_offsets: {wrong}")


def refusal(peer: str, sizes: tuple[int, ...], reads: Reads) -> PullFailed | None:
    """Returns the error of a pull if a `peer` with regions of `sizes` cannot serve it, or None."""
    wrong = outside(sizes, reads.remote_region, reads.remote_offsets, reads.nbytes)
    return None if wrong is None else PullFailed("refused", f"{peer}: {wrong}")


def outside(
    sizes: tuple[int, ...], region: int, offsets: Offsets, nbytes: int | Offsets
) -> str | None:
    """Returns as text why pieces are not inside a region, or None if all are.

    The pieces have `nbytes`, all or each, and begin at `offsets` of the region number `region`;
    `sizes` are the sizes of all regions.
    """
    if not 0 <= region < len(sizes):
        return f"region {region} is not registered, {len(sizes)} are"
    wrong = (offsets < 0) | (offsets > sizes[region] - nbytes)
    if not wrong.any():
        return None
    at = int(wrong.argmax())
    return (
        f"{np.broadcast_to(nbytes, offsets.shape)[at]} bytes at offset {offsets[at]} are outside"
        f" of region {region}, which has {sizes[region]}"
    )
