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


def tried(where: torch.device, submit: Callable[[DeviceWork], Transfer]) -> Transfer | None:
    """Calls `submit` with the kernels of device `where` and returns its result.

    Returns ``None`` if the caller must use the host's code or plain torch: `where` is the host, or
    has no driver or compiler. The latter is logged once.
    """
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
    """Calls `plainly`, a copy in plain torch, and returns it as a `Transfer` that keeps `keep`.

    On a device it runs on `stream`, or on the current stream if that is ``None``.
    """
    if where.type != "cuda":
        plainly()
        return DONE
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        plainly()
        event = torch.cuda.current_stream(where).record_event()
    return Transfer(event, keep)


def note_missing(error: Exception) -> None:
    """Logs a warning, once per process, that plain torch runs instead of kernels."""
    warn_once("kernels.no_device", f"copies use plain torch, which is slow: {error}")
