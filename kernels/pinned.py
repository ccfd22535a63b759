"""The host memory that a device can copy from and to: page-locked, aligned, in slots."""

from __future__ import annotations

import ctypes
import platform
import weakref
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.trace import warn_once

ALIGNMENT = 4096
"""The alignment of the memory and of each slot: a page, as O_DIRECT requires."""

_Bytes: TypeAlias = npt.NDArray[np.uint8]

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
_PREFERRED = 1  # MPOL_PREFERRED
_MBIND = {"x86_64": 237, "aarch64": 235}


class PinnedPool:
    """The staging memory in slots of a fixed size. It is freed with the last tensor made from it.

    The memory is page-locked by the driver, since torch's own page-locked memory has sizes of
    powers of two: 33 GiB would take 64. Page-locking blocks for seconds per 10 GiB. Without CUDA it
    is plain memory, whose pages are allocated when they are written to.

    Args:
        nbytes: the least size of the memory; rounded up to whole slots.
        numa_node: the NUMA node of the memory, best that of the device. If the kernel does not
            allow the choice, a warning is logged once.
        slot_nbytes: the size of a slot, rounded up to 4 KiB.
        pin: whether to page-lock the memory; by default if there is CUDA.

    Attributes:
        memory: 1-D uint8 of all slots.
        slots: the same as ``[num_slots, slot_nbytes]``.
        pinned: whether the memory is page-locked.

    Raises:
        ConfigurationError: (a ``ValueError``) a size is below 1, there is no such NUMA node, or the
            memory cannot be allocated or page-locked.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        numa_node: int | None = None,
        slot_nbytes: int = ALIGNMENT,
        pin: bool | None = None,
    ) -> None:
        if nbytes < 1:
            raise ConfigurationError(f"nbytes: {nbytes} must be at least 1")
        if slot_nbytes < 1:
            raise ConfigurationError(f"slot_nbytes: {slot_nbytes} must be at least 1")
        if numa_node is not None and not _node_path(numa_node).exists():
            raise ConfigurationError(f"numa_node: {numa_node}; there is no {_node_path(numa_node)}")
        slot_nbytes = -(-slot_nbytes // ALIGNMENT) * ALIGNMENT
        num_slots = -(-nbytes // slot_nbytes)
        self.pinned = torch.cuda.is_available() if pin is None else pin
        try:
            memory = host_bytes(num_slots * slot_nbytes)
            if numa_node is not None:
                _prefer_node(memory, numa_node)
            if self.pinned:
                page_lock(memory)
        except (MemoryError, RuntimeError) as error:
            raise ConfigurationError(
                f"nbytes: {nbytes} bytes of host memory cannot be had ({error}); give less, or "
                "raise the limit of locked memory (ulimit -l)"
            ) from error
        self.memory = torch.from_numpy(memory)
        self.slots: Tensor = self.memory.view(num_slots, slot_nbytes)


def host_bytes(nbytes: int) -> _Bytes:
    """Allocates zeroed bytes at an address that is a multiple of 4 KiB.

    Raises:
        MemoryError: `nbytes` cannot be allocated.
    """
    # NumPy asks for huge pages, which makes the first touch of a large pool several times cheaper.
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def page_lock(memory: _Bytes) -> None:
    """Page-locks `memory`, which `host_bytes` returned, for as long as it lives. Blocks.

    Raises:
        RuntimeError: page-locking failed.
    """
    if not memory.nbytes:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    code = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if code:
        raise RuntimeError(f"cudaHostRegister: error {code}")
    # The array that owns the memory dies after the last tensor; it unlocks before it frees.
    unlock = weakref.finalize(memory.base, runtime.cudaHostUnregister, address)
    unlock.atexit = False  # the driver may be gone by then, and the process ends anyway


def _node_path(node: int) -> Path:
    return Path(f"/sys/devices/system/node/node{node}")


def _prefer_node(memory: _Bytes, node: int) -> None:
    """Makes the kernel prefer `node` for pages of `memory` that are not allocated yet.

    Logs a warning, once per process, if the kernel refuses.
    """
    number = _MBIND.get(platform.machine())
    failure = "unknown on this machine"
    if number is not None:
        width = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (node // width + 1))()
        mask[node // width] = 1 << node % width
        libc = ctypes.CDLL(None, use_errno=True)
        nbytes = -(-memory.nbytes // ALIGNMENT) * ALIGNMENT
        if not libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(memory.ctypes.data),
            ctypes.c_ulong(nbytes),
            ctypes.c_int(_PREFERRED),
            mask,
            ctypes.c_ulong(len(mask) * width + 1),
            ctypes.c_uint(0),
        ):
            return
        failure = f"error {ctypes.get_errno()}"
    warn_once(
        "pinned.numa", f"numa_node={node}: the kernel does not let one choose, mbind {failure}"
    )
