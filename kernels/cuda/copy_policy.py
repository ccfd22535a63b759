"""The choice of a route for a copy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from kvconnect.errors import ConfigurationError

__all__ = ["CopyPolicy", "Direction", "Route"]

_KIB = 1024
_MIB = 1024 * _KIB


class Direction(Enum):
    """The direction of a copy, seen from the device."""

    WITHIN = "within"
    LOAD = "load"
    STORE = "store"


class Route(Enum):
    """The route of a copy.

    | route | how the bytes move |
    |---|---|
    | `KERNEL` | a kernel reads and writes both sides (page-locked host memory, too) |
    | `DMA` | copy engines, run by run |
    | `STAGED` | a kernel between blocks and a device buffer, one copy between that and the host |
    | `BOUNCE` | through page-locked memory, as the host's is pageable |
    """

    KERNEL = "kernel"
    DMA = "dma"
    STAGED = "staged"
    BOUNCE = "bounce"


@dataclass(frozen=True, slots=True)
class CopyPolicy:
    """The thresholds at which one route becomes faster than another, for one device.

    Attributes:
        load_dma_from: bytes of a run from which on loads are DMA; below, a kernel.
        store_dma_from: the same of stores; below, they are staged.
        host_ctas: blocks of a kernel that reads host memory: the link is full with 2 to 4, and more
            would only take multiprocessors from others.
        ctas_per_multiprocessor: blocks of any other kernel, at most.
        slot_nbytes, num_slots: buffers for staged copies and for pageable memory.

    Raises:
        ConfigurationError: a number is not positive.
    """

    load_dma_from: int = 28 * _KIB
    store_dma_from: int = 64 * _KIB
    host_ctas: int = 4
    ctas_per_multiprocessor: int = 8
    slot_nbytes: int = 16 * _MIB
    num_slots: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{field.name}: {value!r} must be a positive integer")

    def choose(self, direction: Direction, run_nbytes: float) -> Route:
        """Returns the route for page-locked or device memory.

        It is for copies outside of graphs, with ids on the host.

        Args:
            direction: of the copy.
            run_nbytes: of a run as it would be submitted, after merging; the mean of the call.
        """
        if direction is Direction.WITHIN:
            return Route.KERNEL
        if direction is Direction.LOAD:
            return Route.DMA if run_nbytes >= self.load_dma_from else Route.KERNEL
        return Route.DMA if run_nbytes >= self.store_dma_from else Route.STAGED
