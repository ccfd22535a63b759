"""Where work goes: to the host's own loops, to a device, or to plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from kvconnect.kernels.blocks.transfer import DONE, Transfer
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.cuda import device
from kvconnect.trace import warn_once

_HOST = torch.device("cpu")

__all__ = ["is_host_work", "note_missing", "run_plainly", "submit_copy"]


def is_host_work(one: torch.device, other: torch.device) -> bool:
    """Whether both memories are the host's, and no device was put in its place (for tests)."""
    return one == other == _HOST and not device.wanted(one)


def submit_copy(copy: BlockCopy, stream: Any, path: str, plainly: Callable[[], None]) -> Transfer:
    """Have it copied on `path`; `plainly` does the same in plain torch.

    Raises:
        RuntimeError: there is no device for the path that was asked for.
    """
    if path != "torch":
        try:
            return device.submit_copy(copy, stream=stream, path=path)
        except device.NoDevice as error:
            if path != "auto":
                raise
            note_missing(error)
    where = copy.source_device if copy.source_device.type == "cuda" else copy.target_device
    return run_plainly(plainly, where, stream, copy.keep)


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


def note_missing(error: Exception) -> None:
    """Plain torch does what a kernel should."""
    warn_once("kernels.no_device", f"copies use plain torch, which is slow: {error}")
