"""The extents of tensors in memory, and checks for elements that share memory."""

from __future__ import annotations

from torch import Tensor


def extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first address of `tensor` and the one after its last byte.

    No stride may be negative.
    """
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    low = tensor.data_ptr()
    return low, low + (last + 1) * tensor.element_size()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether both tensors are views of one storage, and their extents overlap."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if not one.numel() or not other.numel():
        return False
    low, high = extent(one)
    other_low, other_high = extent(other)
    return low < other_high and other_low < high


def shares_elements(tensor: Tensor) -> bool:
    """Returns whether two indices of `tensor` may refer to the same memory."""
    # Sorted by stride, each axis must step over the span of the axes before it.
    span = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride < span:
                return True
            span += stride * (length - 1)
    return False
