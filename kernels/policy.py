"""The hardware and software of this machine for copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvconnect.kernels.cuda.compile.nvrtc import NvrtcMissing, find_nvrtc
from kvconnect.kernels.cuda.driver.cuda_library import cuda_library
from kvconnect.kernels.cuda.driver.interface import NoDevice


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The hardware and software that copies can use here.

    Attributes:
        devices: names of the CUDA devices that torch can use.
        driver: the CUDA version that the driver supports, as ``"13.0"``; ``None`` without a driver.
        nvrtc: the version of the compiler; ``None`` without a compiler.
        batched_dma: whether the driver accepts copies in batches (since CUDA 12.8).
        missing: the reasons for which kernels cannot run, a sentence each; empty if they can.
    """

    devices: tuple[str, ...]
    driver: str | None
    nvrtc: str | None
    batched_dma: bool
    missing: tuple[str, ...]

    @property
    def kernels(self) -> bool:
        """Returns whether kernels can run."""
        return not self.missing


def capabilities() -> Capabilities:
    """Returns the capabilities of this machine. Raises, compiles and allocates nothing."""
    missing = []
    driver, batched, nvrtc = None, False, None
    try:
        library = cuda_library()
        driver, batched = "{}.{}".format(*library.version), library.batch is not None
    except NoDevice as error:
        missing.append(str(error))
    try:
        nvrtc = find_nvrtc().version
    except NvrtcMissing as error:
        missing.append(str(error))
    devices: tuple[str, ...] = ()
    if torch.cuda.is_available():
        devices = tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    elif driver is not None:
        missing.append(f"torch {torch.__version__} is built without CUDA, or sees no device")
    return Capabilities(devices, driver, nvrtc, batched, tuple(missing))
