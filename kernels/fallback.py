"""Runs plain torch in place of kernels, where there is no device or no driver for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.cuda import device
from kvconnect.kernels.cuda.device import DeviceWork
from kvconnect.trace import warn_once

__all__ = ["note_missing", "run_plainly", "tried"]


def tried(where: torch.device, submit: Callable[[DeviceWork], Transfer]) -> Transfer | None:
    """Returns what `submit` makes of work on `where`; ``None``: the host or plain torch does it."""
    if not device.wanted(where):
        return None
    try:
        return submit(device.device_work(where))
    except device.NoDevice as error:
        note_missing(error)
        return None


def run_plainly(
    plainly: Callable[[], None], where: torch.device, stream: Any, keep: tuple[object, ...]
) -> Transfer:
    """Runs `plainly`, on `stream` or the current one of device `where`."""
    if where.type != "cuda":
        plainly()
        return DONE
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        plainly()
        event = torch.cuda.current_stream(where).record_event()
    return Transfer(event, keep)


def note_missing(error: Exception) -> None:
    """Warns once that plain torch runs instead of kernels."""
    warn_once("kernels.no_device", f"copies use plain torch, which is slow: {error}")
