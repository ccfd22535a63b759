"""Where work goes: to the host's own loops, to a device, or to plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.cuda import device
from kvconnect.kernels.cuda.device import DeviceWork
from kvconnect.trace import warn_once

_HOST = torch.device("cpu")

__all__ = ["is_host_work", "run_plainly", "submit_copy", "tried"]


def is_host_work(one: torch.device, other: torch.device) -> bool:
    """Whether both memories are the host's, and no device was put in its place (for tests)."""
    return one == other == _HOST and not device.wanted(one)


def submit_copy(copy: BlockCopy, stream: Any, path: str, plainly: Callable[[], None]) -> Transfer:
    """Have it copied on `path`; `plainly` does the same in plain torch.

    Raises:
        RuntimeError: there is no device for the path that was asked for.
    """
    where = copy.source_device if copy.source_device.type == "cuda" else copy.target_device
    if path != "torch":
        try:
            return device.device_work(where).copy(copy, stream, path)
        except device.NoDevice as error:
            if path != "auto":
                raise
            _note_missing(error)
    return run_plainly(plainly, where, stream, copy.keep)


def tried(where: torch.device, submit: Callable[[DeviceWork], Transfer]) -> Transfer | None:
    """What `submit` makes of the work of `where`; ``None``: it is the host's, or plain torch's."""
    if not device.wanted(where):
        return None
    try:
        return submit(device.device_work(where))
    except device.NoDevice as error:
        _note_missing(error)
        return None


def run_plainly(
    plainly: Callable[[], None], where: torch.device, stream: Any, keep: tuple[object, ...]
) -> Transfer:
    """Run `plainly`, on `stream` or the current one of device `where`."""
    if where.type != "cuda":
        plainly()
        return DONE
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        plainly()
        event = torch.cuda.current_stream(where).record_event()
    return Transfer(event, keep)


def _note_missing(error: Exception) -> None:
    """Plain torch does what a kernel should."""
    warn_once("kernels.no_device", f"copies use plain torch, which is slow: {error}")
