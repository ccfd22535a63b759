"""A CUDA device: torch's streams, events and memory, and the driver's launches and batches."""

from __future__ import annotations

import ctypes
import threading
import weakref
from array import array
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvconnect.kernels.blocks.transfer import CopyEvent
from kvconnect.kernels.cuda.compile.cubin_cache import CubinCache
from kvconnect.kernels.cuda.compile.nvrtc import NvrtcMissing, compile_part, find_nvrtc
from kvconnect.kernels.cuda.compile.sources import CompiledPart, Kernel
from kvconnect.kernels.cuda.driver.cuda_library import CudaLibrary, cuda_library
from kvconnect.kernels.cuda.driver.interface import (
    THREADS,
    AccessOrder,
    Descriptors,
    DriverError,
    Memory,
    NoDevice,
)
from kvconnect.kernels.cuda.driver.streams import copy_streams

_LEGACY: Final = {0, 1}
"""Handles of the legacy default stream: torch's, and ``CU_STREAM_LEGACY``."""


class _CopyAttributes(ctypes.Structure):
    """The struct ``CUmemcpyAttributes``; the hints are for managed memory."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaDriver:
    """Implements `kvconnect.kernels.cuda.driver.interface.Driver`. Streams are `torch.cuda.Stream`.

    Attributes:
        multiprocessors, error_word: see `Driver`.

    Args:
        index: the number of the device.
        cubins: the cache of compiled kernels; the user's cache by default.

    Raises:
        NoDevice: there is no driver.
    """

    def __init__(self, index: int, *, cubins: CubinCache | None = None) -> None:
        self._device = torch.device("cuda", index)
        self._cuda: CudaLibrary = cuda_library()
        self._context = self._cuda.primary_context(index)
        properties: Any = torch.cuda.get_device_properties(self._device)
        self.multiprocessors = int(properties.multi_processor_count)
        self._arch = f"sm_{properties.major}{properties.minor}"
        self._cubins = cubins or CubinCache()
        self._lock = threading.Lock()
        self._modules: dict[CompiledPart, ctypes.c_void_p] = {}
        self._functions: dict[Kernel, ctypes.c_void_p] = {}
        # For one-time setup. A stream of torch, so that no other stream gets its memory.
        self._setup = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._errors = self.constant(np.zeros(1, np.int64))
        self.error_word = self._errors.address

    def on_device(self, device: torch.device) -> bool:
        """Returns whether `device` is a CUDA device, as `Driver.on_device` describes."""
        return device.type == "cuda"

    def current_stream(self) -> torch.cuda.Stream:
        """Returns torch's current stream of this device."""
        return torch.cuda.current_stream(self._device)

    def copy_stream(self, kind: Literal["load", "store"]) -> torch.cuda.Stream:
        """Returns one of the two `copy_streams` of this device."""
        pair = copy_streams(self._device)
        return pair.load if kind == "load" else pair.store

    def is_legacy_default(self, stream: torch.cuda.Stream) -> bool:
        """Returns whether `stream` is the legacy default stream, which waits for all others."""
        return stream.cuda_stream in _LEGACY

    def capturing(self, stream: torch.cuda.Stream) -> bool:
        """Returns whether new work of `stream` becomes part of a CUDA graph."""
        status = ctypes.c_int()
        handle = ctypes.c_void_p(stream.cuda_stream)
        with self._cuda.current(self._context):
            self._cuda.call("cuStreamIsCapturing", handle, ctypes.byref(status))
        return status.value != 0

    def record(self, stream: torch.cuda.Stream) -> CopyEvent:
        """Returns a new event that happens after all work submitted to `stream` so far."""
        event: CopyEvent = stream.record_event()
        return event

    def launch(
        self, kernel: Kernel, ctas: int, params: array[int], stream: torch.cuda.Stream
    ) -> None:
        """Launches `kernel` on `stream`, as `Driver.launch` describes."""
        with self._cuda.current(self._context):
            function = self._functions.get(kernel) or self._load(kernel)
            arguments = (ctypes.c_void_p * 1)(params.buffer_info()[0])
            self._cuda.call(
                "cuLaunchKernel",
                *(function, ctas, 1, 1, THREADS, 1, 1, 0),
                *(stream.cuda_stream, ctypes.addressof(arguments), None),
            )

    def copy_batch(
        self, descriptors: Descriptors, order: AccessOrder, stream: torch.cuda.Stream
    ) -> None:
        """Submits copies to `stream`, as `Driver.copy_batch` describes.

        Submits the copies one by one to a driver before CUDA 12.8.
        """
        with self._cuda.current(self._context):
            if self._cuda.batch is None:
                self._copy_each(descriptors, stream)
            else:
                self._copy_all(descriptors, order, stream)

    def upload(self, data: npt.NDArray[Any], stream: torch.cuda.Stream) -> Memory:
        """Copies `data` to the device for `stream`, as `Driver.upload` describes."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        pinned = torch.empty(flat.size, dtype=torch.uint8, pin_memory=True)
        pinned.numpy()[:] = flat
        with torch.cuda.stream(stream):
            there = pinned.to(self._device, non_blocking=True)
        return Memory(there.data_ptr(), flat.size, (there, pinned))

    def constant(self, data: npt.NDArray[Any]) -> Memory:
        """Copies `data` to the device for all streams, as `Driver.constant` describes."""
        flat = np.ascontiguousarray(data)
        address = ctypes.c_uint64()
        source, size = ctypes.c_void_p(flat.ctypes.data), ctypes.c_size_t(flat.nbytes)
        setup = ctypes.c_void_p(self._setup.cuda_stream)
        # Not torch's memory: while a graph is captured that would belong to the graph.
        with self._cuda.current(self._context), self._cuda.outside_of_captures():
            self._cuda.call("cuMemAlloc_v2", ctypes.byref(address), size)
            self._cuda.call("cuMemcpyHtoDAsync_v2", address, source, size, setup)
            self._cuda.call("cuStreamSynchronize", setup)
        return Memory(address.value, flat.nbytes, _Owned(self._cuda, self._context, address))

    def device_memory(self, nbytes: int) -> Memory:
        """Allocates `nbytes` of device memory."""
        # Allocated on the set-up stream: memory of another stream may still be in use there.
        with torch.cuda.stream(self._setup):
            there = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return Memory(there.data_ptr(), nbytes, there)

    def host_memory(self, nbytes: int) -> Memory:
        """Allocates `nbytes` of page-locked host memory."""
        there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return Memory(there.data_ptr(), nbytes, there)

    def take_errors(self) -> int:
        """Returns and resets the error word, as `Driver.take_errors` describes. Blocks."""
        word, zero = ctypes.c_int64(), ctypes.c_int64()
        address, size = ctypes.c_uint64(self.error_word), ctypes.c_size_t(8)
        torch.cuda.synchronize(self._device)
        with self._cuda.current(self._context):
            self._cuda.call("cuMemcpyDtoH_v2", ctypes.byref(word), address, size)
            self._cuda.call("cuMemcpyHtoD_v2", address, ctypes.byref(zero), size)
        return word.value

    def _load(self, kernel: Kernel) -> ctypes.c_void_p:
        with self._lock:
            module = self._modules.get(kernel.part)
            if module is None:
                try:
                    cubin = compile_part(kernel.part, self._arch, find_nvrtc(), self._cubins)
                except NvrtcMissing as error:
                    raise NoDevice(f"no compiler for {kernel.part.file}.cu: {error}") from error
                module = ctypes.c_void_p()
                with self._cuda.outside_of_captures():
                    self._cuda.call("cuModuleLoadData", ctypes.byref(module), cubin)
                self._modules[kernel.part] = module
            function = ctypes.c_void_p()
            with self._cuda.outside_of_captures():  # code may be loaded as late as here
                self._cuda.call(
                    "cuModuleGetFunction", ctypes.byref(function), module, kernel.entry.encode()
                )
            self._functions[kernel] = function
            return function

    def _copy_all(
        self, descriptors: Descriptors, order: AccessOrder, stream: torch.cuda.Stream
    ) -> None:
        batch = self._cuda.batch
        if batch is None:
            raise DriverError("cuMemcpyBatchAsync: the driver has none")
        attributes = _CopyAttributes(order=int(order))
        begins, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = batch(
            *(_address(descriptors.targets), _address(descriptors.sources)),
            *(_address(descriptors.sizes), len(descriptors)),
            *(ctypes.byref(attributes), ctypes.byref(begins), 1, ctypes.byref(failed)),
            stream.cuda_stream,
        )
        if code:
            self._cuda.check(f"cuMemcpyBatchAsync (copy {failed.value})", code)

    def _copy_each(self, descriptors: Descriptors, stream: torch.cuda.Stream) -> None:
        handle = ctypes.c_void_p(stream.cuda_stream)
        for target, source, size in zip(
            descriptors.targets.tolist(),
            descriptors.sources.tolist(),
            descriptors.sizes.tolist(),
            strict=True,
        ):
            self._cuda.call(
                "cuMemcpyAsync",
                *(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), handle),
            )


class _Owned:
    """The owner of a piece of device memory, which is freed with this object."""

    def __init__(
        self, cuda: CudaLibrary, context: ctypes.c_void_p, address: ctypes.c_uint64
    ) -> None:
        finalizer = weakref.finalize(self, _free, cuda, context, address)
        finalizer.atexit = False  # the driver may be gone by then, and the process ends anyway


def _free(cuda: CudaLibrary, context: ctypes.c_void_p, address: ctypes.c_uint64) -> None:
    # Waits for the device, so that nothing reads it any more.
    with cuda.current(context), cuda.outside_of_captures():
        cuda.call("cuMemFree_v2", address)


def _address(numbers: npt.NDArray[np.int64]) -> int:
    return numbers.ctypes.data
