"""The two copy streams of a device."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

__all__ = ["CopyStreamPair", "copy_streams", "device_index"]

_lock = threading.Lock()
_pairs: dict[int, CopyStreamPair] = {}


@dataclass(frozen=True, slots=True)
class CopyStreamPair:
    """Streams that do not wait for the legacy default stream, nor it for them.

    Attributes:
        load: for copies to the device; it goes before others, as requests wait for
            what it brings.
        store: for copies from the device.
    """

    load: torch.cuda.Stream
    store: torch.cuda.Stream


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; of the current one if `device` names none."""
    index = device.index  # None for "cuda", which torch's annotations forget
    return torch.cuda.current_device() if index is None else index  # type: ignore[redundant-expr]


def copy_streams(device: torch.device) -> CopyStreamPair:
    """Those of `device`, a CUDA device; always the same ones. Thread-safe."""
    index = device_index(device)
    with _lock:
        pair = _pairs.get(index)
        if pair is None:
            pair = _pairs[index] = CopyStreamPair(_stream(index, -1), _stream(index, 0))
        return pair


def _stream(index: int, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index, priority=priority)  # type: ignore[no-untyped-call]
