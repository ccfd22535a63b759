"""Paged memories of all forms, misaligned and strided ones too, for tests of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout

POISON = 0xA5
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def at_offset(nbytes: int, offset: int, fill: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 that begins `offset` bytes behind a multiple of 64."""
    memory = np.full(nbytes + 128, POISON, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    tensor = torch.from_numpy(memory[start : start + nbytes])
    if fill is not None:
        tensor.copy_(fill)
    return tensor


@dataclass(frozen=True)
class Shape:
    """Of a paged memory.

    `pad` elements lie between blocks, unused, `outer_pad` behind each token (HND: head), and
    `row_pad` behind each row.
    """

    form: str
    num_blocks: int
    num_layers: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    layout: str
    shift: int
    pad: int
    outer_pad: int
    row_pad: int


@st.composite
def shapes(draw, *, dtypes=DTYPES, max_blocks=6):
    form = draw(st.sampled_from(["pool", "mla_pool", "layers", "kv_first", "pairs", "latent"]))
    key_dim = draw(st.sampled_from([1, 3, 8, 16, 40, 80, 96]))
    value_dim = key_dim
    if form in {"mla_pool", "pairs"}:
        value_dim = draw(st.sampled_from([key_dim, 3, 8, 32]))
    if form == "latent":
        value_dim = 0
    dtype = draw(st.sampled_from(dtypes))
    return Shape(
        form=form,
        num_blocks=draw(st.integers(3, max_blocks)),
        num_layers=draw(st.integers(1, 3)),
        tokens=draw(st.sampled_from([2, 4, 16])),
        heads=1 if form == "latent" else draw(st.integers(1, 3)),
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        layout="NHD" if "pool" in form else draw(st.sampled_from(["NHD", "HND"])),
        shift=draw(st.sampled_from([0, 0, 16, 8, 4, dtype.itemsize])) // dtype.itemsize,
        pad=draw(st.sampled_from([0, 0, 16, 3])),
        outer_pad=draw(st.sampled_from([0, 0, 0, 16, 2])),
        row_pad=draw(st.sampled_from([0, 0, 0, 8, 1])),
    )


class Case:
    """A paged memory with random content, and its planes for the reference."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self.tensors: list[torch.Tensor] = []
        self._seed = seed
        self.kv = self._bind()

    def copy_planes(self) -> list[torch.Tensor]:
        return [view.clone() for view in self.kv.views]

    def planes_as_bytes(self) -> list[torch.Tensor]:
        return [as_bytes(view) for view in self.kv.views]

    def _memory(self, *sizes: int, outer: int | None = None) -> torch.Tensor:
        # Axis `outer` counts blocks.
        shape = self.shape
        size = shape.dtype.itemsize
        pads = {outer: shape.pad}
        if shape.form not in {"mla_pool", "latent"}:
            pads |= {len(sizes) - 3: shape.outer_pad, len(sizes) - 2: shape.row_pad}
        steps, step = [], 1
        for axis in reversed(range(len(sizes))):
            step += pads.get(axis, 0)
            steps.append(step)
            step *= sizes[axis]
        nbytes = (step + shape.pad) * size
        self._seed += 1
        memory = at_offset(nbytes, shape.shift * size, random_bytes(nbytes, self._seed))
        typed = memory.view(shape.dtype)
        self.tensors.append(memory)
        return typed.as_strided(sizes, list(reversed(steps)))

    def _bind(self) -> PagedKv:
        shape = self.shape
        blocks, layers = shape.num_blocks, shape.num_layers
        inner = [shape.tokens, shape.heads]
        if shape.layout == "HND":
            inner.reverse()
        dim = shape.key_dim
        if shape.form == "pool":
            return PagedKv.from_pool(self._memory(blocks, layers, 2, *inner, dim, outer=0))
        if shape.form == "mla_pool":
            layout = KvCacheLayout(
                layers, shape.heads, dim, shape.value_dim, shape.tokens, shape.dtype
            )
            flat = self._memory(*layout.flat_shape(blocks), outer=0)
            return PagedKv.from_pool(flat, layout)
        made = []
        for _ in range(layers):
            if shape.form == "layers":
                made.append(self._memory(blocks, 2, *inner, dim, outer=0))
            elif shape.form == "kv_first":
                made.append(self._memory(2, blocks, *inner, dim, outer=1))
            elif shape.form == "pairs":
                value = self._memory(blocks, *inner, shape.value_dim, outer=0)
                made.append((self._memory(blocks, *inner, dim, outer=0), value))
            else:
                made.append(self._memory(blocks, shape.tokens, dim, outer=0))
        layout = "NHD" if shape.form == "latent" else shape.layout
        return PagedKv.from_layers(made, layout=layout)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).clone()
