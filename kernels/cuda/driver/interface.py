"""The interface of a device for copies; drivers of tests record calls, or run on the CPU."""

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

THREADS = 256
"""The threads of a block of every kernel."""

MAX_BATCH = 8192
"""The most descriptors of one call of `Driver.copy_batch`."""


class NoDevice(RuntimeError):
    """The error that there is no CUDA driver, device or compiler; the message says which."""


class DriverError(RuntimeError):
    """The error of a call that the driver refused; the message names the call and the reason.

    The requested work may be done in part.
    """


class AccessOrder(IntEnum):
    """The time at which a batch may read its sources."""

    STREAM = 1
    """In stream order."""
    ANY = 3
    """At any time from the call on, also before earlier work of the stream."""


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """The copies of a batch, in no order: addresses and bytes, contiguous int64 ``[n]`` each."""

    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    def part(self, start: int, stop: int) -> Descriptors:
        """Returns the copies `start` to `stop` - 1."""
        return Descriptors(
            self.sources[start:stop], self.targets[start:stop], self.sizes[start:stop]
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all copies."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A memory range of `nbytes` at `address`, valid for as long as `keep` is alive."""

    address: int
    nbytes: int
    keep: object


class Driver(Protocol):
    """A device. Thread-safe. Streams are opaque objects of the driver.

    Every method may raise `DriverError`. Only the methods that allocate memory, `take_errors` and a
    kernel's first `launch` may block.
    """

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors."""

    def on_device(self, device: torch.device) -> bool:
        """Returns whether memory of torch's `device` is memory of this device."""

    def current_stream(self) -> Any:
        """Returns the stream that the calling thread works on."""

    def copy_stream(self, kind: Literal["load", "store"]) -> Any:
        """Returns the device's stream for loads or stores; never the legacy default stream."""

    def is_legacy_default(self, stream: Any) -> bool:
        """Returns whether `stream` is the legacy default stream, which waits for all others."""

    def capturing(self, stream: Any) -> bool:
        """Returns whether new work of `stream` becomes part of a graph instead of running."""

    def record(self, stream: Any) -> CopyEvent:
        """Returns a new event that happens after all work submitted to `stream` so far."""

    def launch(self, kernel: Kernel, ctas: int, params: array[int], stream: Any) -> None:
        """Launches a kernel of `ctas` blocks of 256 threads on `stream`.

        Args:
            kernel: the kernel; its first launch compiles and loads it, which blocks.
            ctas: the number of thread blocks, at least 1.
            params: the bytes of the kernel's one parameter; read before this returns.
            stream: the stream that the kernel runs on.

        Raises:
            NoDevice: the kernel cannot be compiled, as there is no NVRTC.
        """

    def copy_batch(self, descriptors: Descriptors, order: AccessOrder, stream: Any) -> None:
        """Submits at most `MAX_BATCH` copies to `stream`, which must not capture a graph."""

    def upload(self, data: npt.NDArray[Any], stream: Any) -> Memory:
        """Copies `data` to new memory of the device, for later work of `stream`.

        The caller keeps the result until that work is done. `stream` must not capture a graph.
        """

    def constant(self, data: npt.NDArray[Any]) -> Memory:
        """Copies `data` to new memory of the device, for all streams; blocks until it is there.

        May be called while a graph is captured.
        """

    def device_memory(self, nbytes: int) -> Memory:
        """Allocates `nbytes` of device memory."""

    def host_memory(self, nbytes: int) -> Memory:
        """Allocates `nbytes` of page-locked host memory."""

    @property
    def error_word(self) -> int:
        """The address of the int64 in which kernels count invalid ids."""

    def take_errors(self) -> int:
        """Returns the value of the error word and resets it to 0.

        Blocks until all work of the device is done.
        """
