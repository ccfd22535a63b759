"""What the copies need of a device; tests bring drivers that record, or that run on the CPU."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvconnect.kernels.blocks.transfer import CopyEvent
from kvconnect.kernels.cuda.compile.sources import Kernel

__all__ = [
    "MAX_BATCH",
    "THREADS",
    "AccessOrder",
    "Descriptors",
    "Driver",
    "DriverError",
    "Memory",
    "NoDevice",
]

THREADS = 256
"""Of a block of every kernel."""

MAX_BATCH = 8192
"""Descriptors of one call of `Driver.copy_batch`, at most."""


class NoDevice(RuntimeError):
    """There is no driver, or no compiler for it; the message names the places searched."""


class DriverError(RuntimeError):
    """The driver refused a call; the message names it and the driver's error.

    What was asked may be done in part.
    """


class AccessOrder(IntEnum):
    """When a batch may read its sources."""

    STREAM = 1
    """In stream order."""
    ANY = 3
    """At any time from the call on, also before what the stream was given earlier."""


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Copies of a batch, in no order: addresses and bytes, int64 ``[n]`` each, contiguous."""

    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    def part(self, start: int, stop: int) -> Descriptors:
        """Those from `start` to before `stop`."""
        return Descriptors(
            self.sources[start:stop], self.targets[start:stop], self.sizes[start:stop]
        )

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """`nbytes` at `address`, valid for as long as `keep` is alive."""

    address: int
    nbytes: int
    keep: object


class Driver(Protocol):
    """One device. Thread-safe. Streams are whatever the driver says, and passed back as they are.

    Every method may raise `DriverError`.
    """

    @property
    def multiprocessors(self) -> int:
        """How many there are."""

    def on_device(self, device: torch.device) -> bool:
        """Whether memory there is this device's own."""

    def current_stream(self) -> Any:
        """The stream that the calling thread works on."""

    def copy_stream(self, kind: Literal["load", "store"]) -> Any:
        """The device's stream for copies to it, or from it; never the legacy default stream."""

    def is_legacy_default(self, stream: Any) -> bool:
        """Whether `stream` is the one that waits for all others."""

    def capturing(self, stream: Any) -> bool:
        """Whether what `stream` is given becomes part of a graph instead of running."""

    def record(self, stream: Any) -> CopyEvent:
        """A new event behind all that `stream` was given so far."""

    def launch(self, kernel: Kernel, ctas: int, params: array[int], stream: Any) -> None:
        """Give `stream` a kernel of `ctas` blocks of 256 threads.

        Args:
            kernel: compiled and loaded first if that has not been done.
            ctas: at least 1.
            params: the bytes of its one parameter; read before this returns.
            stream: where it runs.

        Raises:
            NoDevice: it cannot be compiled, as there is no NVRTC.
        """

    def copy_batch(self, descriptors: Descriptors, order: AccessOrder, stream: Any) -> None:
        """Give `stream` at most `MAX_BATCH` copies; not while it captures."""

    def upload(self, data: npt.NDArray[Any], stream: Any) -> Memory:
        """A copy of `data` on the device, for what `stream` is given from now on.

        The result is kept by the caller until that is done. Not while `stream` captures.
        """

    def constant(self, data: npt.NDArray[Any]) -> Memory:
        """A copy of `data` on the device, at once and for all streams; also during a capture."""

    def device_memory(self, nbytes: int) -> Memory:
        """Memory of the device."""

    def host_memory(self, nbytes: int) -> Memory:
        """Page-locked host memory."""

    @property
    def error_word(self) -> int:
        """Address of the int64 in which kernels count invalid ids."""

    def take_errors(self) -> int:
        """The error word, which becomes 0. Waits for all work of the device."""
