"""The CUDA driver library, called by ctypes, so that nothing has to be built."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from kvconnect.kernels.cuda.driver.interface import DriverError, NoDevice

_LIBRARY: Final = "libcuda.so.1"
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_BATCH_SINCE: Final = 12080
"""CUDA 12.8. The requested version decides the list of arguments: 13.0 dropped one of them."""


class CudaLibrary:
    """The functions of ``libcuda``; `call` raises the errors that they return.

    Attributes:
        batch: ``cuMemcpyBatchAsync`` as of CUDA 12.8, or ``None`` if the driver is older.

    Raises:
        NoDevice: there is no library, or no device that it can use.
    """

    def __init__(self, name: str = _LIBRARY) -> None:
        try:
            self._cuda = ctypes.CDLL(name)
        except OSError as error:
            raise NoDevice(
                f"no CUDA driver: {name} was searched for where the loader looks "
                f"(LD_LIBRARY_PATH, ldconfig): {error}"
            ) from error
        self._cuda.cuLaunchKernel.argtypes = (
            ctypes.c_void_p,
            *(ctypes.c_uint,) * 7,
            *(ctypes.c_void_p,) * 3,
        )
        code = self._cuda.cuInit(0)
        if code:
            raise NoDevice(f"no CUDA device: {self._message('cuInit', code)}")
        self.batch = self._find("cuMemcpyBatchAsync", _BATCH_SINCE)

    def call(self, function: str, *arguments: Any) -> None:
        """Calls `function` of the library.

        Raises:
            DriverError: the function returned an error.
        """
        self.check(function, getattr(self._cuda, function)(*arguments))

    def check(self, function: str, code: int) -> None:
        """Raises `DriverError` if `code`, which `function` returned, is an error."""
        if code:
            raise DriverError(self._message(function, code))

    @property
    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports, such as ``(13, 0)``."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def primary_context(self, index: int) -> ctypes.c_void_p:
        """Returns the context that torch uses on device `index`; it is kept alive for good."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def current(self, context: ctypes.c_void_p) -> CurrentContext:
        """Returns a context manager that makes `context` the calling thread's current context.

        A new thread has none.
        """
        return CurrentContext(self, context)

    @contextmanager
    def outside_of_captures(self) -> Iterator[None]:
        """Keeps the calling thread's work out of a graph that is being captured.

        Otherwise, loading code or allocating memory would break any capture in the process.
        """
        mode = ctypes.c_int(_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _find(self, name: str, version: int) -> Callable[..., int] | None:
        address, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._cuda.cuGetProcAddress_v2(
            name.encode(),
            ctypes.byref(address),
            version,
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if code or not address.value:
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        # Targets, sources, sizes, how many; attributes, where they begin, how many; which failed;
        # the stream.
        made = ctypes.CFUNCTYPE(
            ctypes.c_int, *(pointer,) * 3, size, *(pointer,) * 2, size, *(pointer,) * 2
        )
        found: Callable[..., int] = made(address.value)
        return found

    def _message(self, function: str, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        return f"{function}: {(text.value or b'unknown error').decode()} ({code})"


class CurrentContext:
    """The context manager of `CudaLibrary.current`. A generator would slow down every launch."""

    __slots__ = ("_context", "_library", "_pushed")

    def __init__(self, library: CudaLibrary, context: ctypes.c_void_p) -> None:
        self._library = library
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        now = ctypes.c_void_p()
        self._library.call("cuCtxGetCurrent", ctypes.byref(now))
        if now.value != self._context.value:
            self._library.call("cuCtxPushCurrent_v2", self._context)
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            popped = ctypes.c_void_p()
            self._library.call("cuCtxPopCurrent_v2", ctypes.byref(popped))


@cache
def cuda_library() -> CudaLibrary:
    """Returns the one `CudaLibrary` of this process.

    Raises:
        NoDevice: see `CudaLibrary`.
    """
    return CudaLibrary()
