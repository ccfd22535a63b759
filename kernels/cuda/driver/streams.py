"""The two copy streams of a device."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

_lock = threading.Lock()
_pairs: dict[int, CopyStreamPair] = {}


@dataclass(frozen=True, slots=True)
class CopyStreamPair:
    """The two copy streams, independent of the legacy default stream.

    Attributes:
        load: for copies to the device. It has priority, as requests wait for loaded blocks.
        store: for copies from the device.
    """

    load: torch.cuda.Stream
    store: torch.cuda.Stream


def device_index(device: torch.device) -> int:
    """Returns the number of the CUDA device `device`; the current one's if it has no number."""
    index = device.index  # None for "cuda", which torch's annotations forget
    return torch.cuda.current_device() if index is None else index  # type: ignore[redundant-expr]


def copy_streams(device: torch.device) -> CopyStreamPair:
    """Returns the copy streams of the CUDA device `device`, made by the first call. Thread-safe."""
    index = device_index(device)
    with _lock:
        pair = _pairs.get(index)
        if pair is None:
            pair = _pairs[index] = CopyStreamPair(_stream(index, -1), _stream(index, 0))
        return pair


def _stream(index: int, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index, priority=priority)  # type: ignore[no-untyped-call]
