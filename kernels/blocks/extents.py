"""The extents of tensors in memory, and whether elements share it."""

from __future__ import annotations

from torch import Tensor

__all__ = ["extent", "overlap", "shares_elements"]


def extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first address and the one after the last byte; strides are not negative."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    low = tensor.data_ptr()
    return low, low + (last + 1) * tensor.element_size()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether both are of one storage, and their extents overlap."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if not one.numel() or not other.numel():
        return False
    low, high = extent(one)
    other_low, other_high = extent(other)
    return low < other_high and other_low < high


def shares_elements(tensor: Tensor) -> bool:
    """Returns whether two indices may refer to one element."""
    # Sorted by stride every axis must step over all that the ones below it span.
    span = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride < span:
                return True
            span += stride * (length - 1)
    return False
