"""Submits checked work to a device: chooses route and stream, and refuses impossible paths.

Loading this module loads neither driver nor compiler; the first piece of work does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.blocks.work import AppendWork, BlockCopy, UpdateWork
from kvconnect.kernels.cuda.copy_policy import CopyPolicy, Direction, Route
from kvconnect.kernels.cuda.dma import describe
from kvconnect.kernels.cuda.driver.interface import Descriptors, Driver, NoDevice
from kvconnect.kernels.cuda.driver.streams import device_index
from kvconnect.kernels.cuda.launch.launcher import Grid, Launcher
from kvconnect.kernels.cuda.launch.tokens import launch_append, launch_update
from kvconnect.kernels.cuda.routes import Routes
from kvconnect.trace import warn_once


class DeviceWork:
    """The ops of one device. Thread-safe.

    Args:
        driver: the driver of the device.
        policy: chooses the routes; the default one if not given.
    """

    def __init__(self, driver: Driver, policy: CopyPolicy | None = None) -> None:
        self.driver = driver
        self.policy = policy or CopyPolicy()
        self._launcher = Launcher(driver)
        self._routes = Routes(driver, self._launcher, self.policy)

    def copy(self, copy: BlockCopy, stream: Any, path: str) -> Transfer:
        """Submits a copy of blocks. Waits for the copy only with pageable host memory.

        Args:
            copy: a checked copy with at least one side on the device.
            stream: the stream that the copy is ordered on; ``None`` is the current one.
            path: ``"auto"``, ``"kernel"``, ``"dma"`` or ``"staged"``. With ``"auto"`` and
                ``"dma"``, pageable host memory is copied through page-locked buffers by the calling
                thread.

        Returns:
            The copy; done already if a graph is captured, or a store went to pageable memory.

        Raises:
            RuntimeError: that path is not possible while a graph is captured, with ids on the
                device, or with pageable memory; nothing was copied.
            DriverError: some, all or none of the targets are written.
        """
        if not len(copy) or not copy.nbytes:
            return DONE
        if stream is None:
            stream = self.driver.current_stream()
        direction = self._direction(copy)
        capturing = self.driver.capturing(stream)
        _refuse(copy, direction, path, capturing=capturing)
        within = direction is Direction.WITHIN and path == "auto"
        if path == "kernel" or within or capturing or not copy.on_host:
            return self._routes.by_kernel(copy, direction, stream, capturing=capturing)
        runs = describe(copy)
        route = self._route(copy, direction, path, runs)
        if route is Route.STAGED:
            return self._routes.by_stage(copy, direction, stream)
        if route is Route.BOUNCE:
            return self._routes.by_bounce(copy, direction, runs, stream)
        if route is Route.DMA:
            return self._routes.by_dma(copy, direction, runs, stream)
        return self._routes.by_kernel(copy, direction, stream, capturing=False)

    def update(self, work: UpdateWork) -> Transfer:
        """Submits a `kv_cache_update` to the current stream."""
        if not work.update.numel():
            return DONE
        return self._run(partial(launch_update, self._launcher, work))

    def append(self, work: AppendWork) -> Transfer:
        """Submits a `reshape_and_cache` to the current stream."""
        return self._run(partial(launch_append, self._launcher, work))

    def _run(self, launch: Callable[[Grid], tuple[object, ...]]) -> Transfer:
        stream = self.driver.current_stream()
        ctas = self.driver.multiprocessors * self.policy.ctas_per_multiprocessor
        keep = launch(Grid(stream, ctas))
        if self.driver.capturing(stream):
            return DONE
        return Transfer(self.driver.record(stream), keep)

    def _direction(self, copy: BlockCopy) -> Direction:
        source = self.driver.on_device(copy.source.device)
        target = self.driver.on_device(copy.target.device)
        if source and target:
            return Direction.WITHIN
        return Direction.LOAD if target else Direction.STORE

    def _route(self, copy: BlockCopy, direction: Direction, path: str, runs: Descriptors) -> Route:
        if _pageable(copy, direction):
            return Route.BOUNCE
        if path != "auto":
            return Route(path)
        return self.policy.choose(direction, runs.nbytes / max(1, len(runs)))


def _refuse(copy: BlockCopy, direction: Direction, path: str, *, capturing: bool) -> None:
    """Raises RuntimeError if `path` is not possible for `copy`, as `DeviceWork.copy` describes."""
    if path in {"dma", "staged"}:
        if capturing:
            raise RuntimeError(
                f"path: '{path}' cannot be part of a CUDA graph; take 'kernel' or 'auto' while one "
                "is captured"
            )
        if not copy.on_host:
            raise RuntimeError(f"path: '{path}' needs block ids on the host")
        if path == "staged" and direction is Direction.WITHIN:
            raise RuntimeError("path: 'staged' is for copies from or to host memory")
    only_kernels = capturing or not copy.on_host or path in {"kernel", "staged"}
    if only_kernels and _pageable(copy, direction):
        raise RuntimeError(
            f"path: '{path}' with pageable host memory; give page-locked memory where a graph is "
            "captured, ids are on the device, or a kernel is asked for"
        )


def _pageable(copy: BlockCopy, direction: Direction) -> bool:
    if direction is Direction.WITHIN:
        return False
    return not (copy.source if direction is Direction.LOAD else copy.target).pinned


_lock = threading.Lock()
_devices: dict[int, DeviceWork] = {}
_driven: DeviceWork | None = None


@contextmanager
def driven_by(driver: Driver, policy: CopyPolicy | None = None) -> Iterator[DeviceWork]:
    """Makes all work of this process within the context run on `driver`, for tests."""
    global _driven  # noqa: PLW0603 (one seam instead of a parameter in every public function)
    before, _driven = _driven, DeviceWork(driver, policy)
    try:
        yield _driven
    finally:
        _driven = before


def wanted(device: torch.device) -> bool:
    """Returns whether `device_work` runs the work on memory of `device`."""
    return device.type == "cuda" or _driven is not None


def device_work(device: torch.device) -> DeviceWork:
    """Returns the `DeviceWork` of `device`; makes it with the first call.

    Raises:
        NoDevice: there is no CUDA driver, or `device` is no CUDA device; the message says which.
    """
    driven = _driven
    if driven is not None:
        return driven
    if device.type != "cuda":
        raise NoDevice(f"path: memory is on '{device}', and only CUDA devices have such paths")
    index = device_index(device)
    found = _devices.get(index)
    if found is None:
        from kvconnect.kernels.cuda.driver.cuda_driver import CudaDriver

        with _lock:
            found = _devices.get(index)
            if found is None:
                found = _devices[index] = DeviceWork(CudaDriver(index))
    return found


def tried(where: torch.device, submit: Callable[[DeviceWork], Transfer]) -> Transfer | None:
    """Calls `submit` with the work of device `where` and returns its result.

    Returns ``None`` if the caller must use the host's code or plain torch: `where` is the host, or
    has no driver or compiler. The latter is logged once.
    """
    if not wanted(where):
        return None
    try:
        return submit(device_work(where))
    except NoDevice as error:
        warn_once("kernels.no_device", f"copies use plain torch, which is slow: {error}")
        return None


def id_errors(device: torch.device) -> int:
    """Returns how many ids in memory of the device were out of range since the last call.

    Blocks until the device has done all its work. Such ids are treated like -1: nothing is read or
    written for them.

    Raises:
        NoDevice: see `device_work`.
    """
    return device_work(device).driver.take_errors()
