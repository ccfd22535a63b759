"""Blocks from one order of tokens and heads to the other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.extents import overlap, shares_elements
from kvconnect.kernels.blocks.layers import check_layout
from kvconnect.kernels.blocks.transfer import Transfer
from kvconnect.kernels.cuda.device import DeviceWork
from kvconnect.kernels.fallback import tried
from kvconnect.kernels.library import register

__all__ = ["transpose_blocks"]


def transpose_blocks(src: Tensor, dst: Tensor, *, src_layout: str, dst_layout: str) -> None:
    """Write `src` to `dst`, in `dst_layout`.

    On a device it is enqueued on the current stream.

    Args:
        src: NHD: ``[..., T, heads, dim]``, HND: ``[..., heads, T, dim]``; any strides, but for a
            contiguous last axis.
        dst: the same axes in the order of `dst_layout`; changed.
        src_layout: ``"NHD"`` or ``"HND"``.
        dst_layout: the same; with an equal one it is a copy.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes do not fit, the last axis is not contiguous, elements of `dst` share
            memory with each other or with `src`.
        RuntimeError: devices differ. Nothing was written.
    """
    check_layout("src_layout", src_layout)
    check_layout("dst_layout", dst_layout)
    _transpose(src, dst, src_layout, dst_layout)


def _transpose_on(src: Tensor, dst: Tensor, device: DeviceWork) -> Transfer:
    *_, last = [device.transpose(*piece) for piece in _pieces(src, dst)]
    return last


def _check_shapes(src: Tensor, dst: Tensor, src_layout: str, dst_layout: str) -> None:
    if src.dtype != dst.dtype:
        raise TypeError(f"dst: {dst.dtype}, src is {src.dtype}")
    if src.device != dst.device:
        raise RuntimeError(f"dst: on {dst.device}, src is on {src.device}")
    if src.ndim < 3:
        raise ConfigurationError(f"src: {tuple(src.shape)}; three axes are needed at least")
    shape = tuple(src.transpose(-3, -2).shape if src_layout != dst_layout else src.shape)
    if tuple(dst.shape) != shape:
        raise ConfigurationError(f"dst: {tuple(dst.shape)}; {shape} is needed")


def _check_memory(src: Tensor, dst: Tensor) -> None:
    for name, tensor in (("src", src), ("dst", dst)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ConfigurationError(
                f"{name}: strides {tensor.stride()}: the last axis must be contiguous"
            )
    if not src.numel():
        return
    if shares_elements(dst):
        raise ConfigurationError(
            f"dst: strides {dst.stride()} of {tuple(dst.shape)} make elements share memory"
        )
    if overlap(src, dst):
        raise ConfigurationError("dst: shares memory with src")


def _pieces(src: Tensor, dst: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both as ``[outer, i, j, dim]`` with the same axes, in as few pieces as strides allow."""
    while src.ndim > 4:
        try:
            src, dst = src.view(-1, *src.shape[2:]), dst.view(-1, *dst.shape[2:])
        except RuntimeError:  # the two outer axes are no single one
            for one, other in zip(src.unbind(0), dst.unbind(0), strict=True):
                yield from _pieces(one, other)
            return
    yield (src[None], dst[None]) if src.ndim == 3 else (src, dst)


def _words(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """Both in words as wide as their alignment allows: fewer elements to move."""
    nbytes = src.element_size()
    numbers = [src.shape[-1], *(n for one in (src, dst) for n in one.stride()[:-1])]
    numbers += [int(src.storage_offset()), int(dst.storage_offset())]
    for dtype in (torch.int64, torch.int32, torch.int16):
        ratio, rest = divmod(dtype.itemsize, nbytes)
        if ratio and not rest and not any(number % ratio for number in numbers):
            return src.view(dtype), dst.view(dtype)
    return src, dst


@register("transpose_blocks", changes="dst", fake=_check_shapes)
def _transpose(src: Tensor, dst: Tensor, src_layout: str, dst_layout: str) -> None:
    _check_shapes(src, dst, src_layout, dst_layout)
    _check_memory(src, dst)
    if not src.numel():
        return
    if src_layout != dst_layout:
        dst = dst.transpose(-3, -2)  # now both have the same axes
    if tried(src.device, partial(_transpose_on, src, dst)):
        return
    one, other = _words(src, dst)
    other.copy_(one)
