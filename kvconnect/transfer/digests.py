"""Digests of memory, by which both sides of a read compare their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_DEVICE_NBYTES = 1 << 30
"""Memory of a device is digested up to this size: each piece is copied to the host for it."""


def can_be_digested(memory: Tensor) -> bool:
    """Returns whether `memory` is host memory or at most `LARGEST_DEVICE_NBYTES` large."""
    small = memory.numel() * memory.element_size() <= LARGEST_DEVICE_NBYTES
    return memory.device.type == "cpu" or small


def digest_of(parts: Iterable[Any]) -> int:
    """Returns the xxh3-64 of `parts`, contiguous bytes, in their order."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def digest_of_pieces(memory: Tensor, offsets: Sequence[int], nbytes: int) -> int:
    """Returns the xxh3-64 of the pieces of `nbytes` at `offsets` of `memory`, in that order.

    Blocks while it reads them.

    Raises:
        ValueError: a piece is outside of the memory.
    """
    import torch  # seconds

    flat = memory.detach().reshape(-1).view(torch.uint8)
    if offsets and not 0 <= min(offsets) <= max(offsets) <= flat.numel() - nbytes:
        raise ValueError("a piece is outside of the memory")
    if flat.device.type == "cpu":
        view = flat.numpy().data
        return digest_of(view[offset : offset + nbytes] for offset in offsets)
    return digest_of(flat[offset : offset + nbytes].cpu().numpy().data for offset in offsets)
