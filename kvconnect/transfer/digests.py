"""Digests of pieces of registered memory, by which both sides of a read compare what they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LARGEST_DEVICE_NBYTES", "can_be_digested", "digest_of_pieces"]

LARGEST_DEVICE_NBYTES = 1 << 30
"""Memory of a device is digested up to this size: each piece is copied to the host for it."""


def can_be_digested(memory: Tensor) -> bool:
    """Returns whether `digest_of_pieces` takes `memory`."""
    small = memory.numel() * memory.element_size() <= LARGEST_DEVICE_NBYTES
    return memory.device.type == "cpu" or small


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
    state = xxhash.xxh3_64()
    if flat.device.type == "cpu":
        view = flat.numpy().data
        for offset in offsets:
            state.update(view[offset : offset + nbytes])
    else:
        for offset in offsets:
            state.update(flat[offset : offset + nbytes].cpu().numpy().data)
    return state.intdigest()
