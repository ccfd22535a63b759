"""The choice of a route for a copy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from kvconnect.errors import ConfigurationError

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
    | `BOUNCE` | through page-locked buffers, for pageable host memory |
    """

    KERNEL = "kernel"
    DMA = "dma"
    STAGED = "staged"
    BOUNCE = "bounce"


@dataclass(frozen=True, slots=True)
class CopyPolicy:
    """The thresholds at which one route becomes faster than another, for one device.

    Attributes:
        load_dma_from: loads with runs of at least so many bytes use DMA; others use a kernel.
        store_dma_from: stores with runs of at least so many bytes use DMA; others are staged.
        host_ctas: the thread blocks of a kernel that accesses host memory. 2 to 4 saturate the
            link; more would only take multiprocessors from other work.
        ctas_per_multiprocessor: the most thread blocks of any other kernel.
        slot_nbytes, num_slots: the buffers for staged copies and for pageable memory.

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
        """Returns the fastest route for a copy of page-locked or device memory.

        The copy is not captured in a graph, and its ids are on the host.

        Args:
            direction: the direction of the copy.
            run_nbytes: the mean size of the copy's runs after merging.
        """
        if direction is Direction.WITHIN:
            return Route.KERNEL
        if direction is Direction.LOAD:
            return Route.DMA if run_nbytes >= self.load_dma_from else Route.KERNEL
        return Route.DMA if run_nbytes >= self.store_dma_from else Route.STAGED
