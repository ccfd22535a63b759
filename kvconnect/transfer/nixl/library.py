"""The import of the NIXL library, and the capabilities of UCX on this machine."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigurationError, MissingExtra

_WITHOUT_RDMA = frozenset(("tcp", "cma", "sm", "shm", "self", "posix", "sysv", "knem", "xpmem"))
_COPIED_BY_THE_KERNEL = frozenset(("all", "sm", "shm", "cma"))
_RDMA_DEVICES = Path("/sys/class/infiniband")
_QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
"""The log levels that silence UCX and NIXL. Otherwise they print, on stdout and stderr, for each
read of a peer that has ended. They return the same as errors.
"""


def load() -> Any:
    """Returns NIXL's bindings.

    NIXL's ``nixl_agent`` is not used: it cannot set the progress thread's delay, and with a delay
    of 0 an idle agent uses a whole core. Sets the log levels of UCX and NIXL in the environment to
    silence them, unless they are set there. That has no effect on a library that is loaded already.

    Raises:
        MissingExtra: NIXL is not installed.
        ConfigurationError: NIXL is installed and cannot be imported; the message says why.
    """
    for name, level in _QUIET.items():
        os.environ.setdefault(name, level)
    try:
        return importlib.import_module("nixl._bindings")
    except ModuleNotFoundError as error:
        if error.name == "nixl":
            raise MissingExtra("the transport 'nixl'", "nixl") from error
        raise ConfigurationError(f"nixl is installed, but not usable: {error}") from error
    except (ImportError, OSError) as error:
        raise ConfigurationError(f"nixl is installed, but not usable: {error}") from error


def rdma_possible(tls: str | None, device: str) -> bool:
    """Returns whether UCX may move bytes by a network card's own writes.

    Args:
        tls: the transports that UCX is limited to; None means those of ``UCX_TLS``, or all.
        device: the network device that UCX is limited to.
    """
    if device == "lo":
        return False
    names = (tls or os.environ.get("UCX_TLS", "")).lower()
    if names and _WITHOUT_RDMA.issuperset(names.split(",")):
        return False
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def shares_memory(tls: str | None, device: str) -> bool:
    """Returns whether UCX is limited to this machine and may read by copies of the kernel.

    A core of this process makes those copies.

    Args:
        tls: as in `rdma_possible`.
        device: as in `rdma_possible`; only ``lo`` is limited to this machine.
    """
    if device != "lo":
        return False
    names = set((tls or os.environ.get("UCX_TLS", "all")).lower().split(","))
    return not names.isdisjoint(_COPIED_BY_THE_KERNEL)
