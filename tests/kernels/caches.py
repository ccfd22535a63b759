"""Paged caches in every form that engines have, in memory whose every byte is watched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from hypothesis import strategies as st

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout

POISON = 0xA5
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
]
HND_FORMS = {"stacked", "interleaved", "pairs", "latent"}
GAPS = [(0, 0, 0), (8, 0, 0), (0, 16, 0), (0, 0, 3), (1, 2, 1), (0, 0, 0, 16), (0, 0, 0, 0, 1)]
_MOST_NBYTES = 1 << 23


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    """As many of them, each time the same ones."""
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
    """A cache: its form, its sizes, and how its elements lie.

    `gaps` elements are left out behind the entries of each axis, `shift` before each tensor.
    """

    form: str
    layout: str
    dtype: torch.dtype
    layers: int
    blocks: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    gaps: tuple[int, ...] = (0, 0, 0)
    shift: int = 1

    def make(self, seed: int) -> Cache:
        """One full of random bytes."""
        nbytes = Cache(self, torch.empty(_MOST_NBYTES, dtype=torch.uint8)).nbytes
        return Cache(self, at_offset(nbytes, 0, random_bytes(nbytes, seed)))


class Cache:
    """A cache of a shape in `memory`.

    Attributes:
        kv: it, bound.
        tensors: the memory of each of its tensors, as bytes.
        nbytes: of `memory` that it takes.
        planes: views ``[blocks, tokens, heads, dim]`` (HND: ``[blocks, heads, tokens, dim]``) as
            bytes, layer by layer, keys before values: made here, by plain indexing.
    """

    def __init__(self, shape: Shape, memory: torch.Tensor) -> None:
        self.shape = shape
        self.memory = memory
        self.tensors: list[torch.Tensor] = []
        self.nbytes = 0
        self.kv, planes = getattr(self, f"_{shape.form}")()
        self.planes = [plane.view(torch.uint8) for plane in planes]

    def clone(self) -> Cache:
        """The same bytes elsewhere."""
        return Cache(self.shape, at_offset(self.nbytes, 0, self.memory))

    def row(self, block: int, layers: range | None = None) -> torch.Tensor:
        """A block's bytes in a contiguous buffer."""
        return torch.cat([plane[block].reshape(-1) for plane in self.of(layers)])

    def of(self, layers: range | None) -> list[torch.Tensor]:
        """The planes of these layers."""
        per_layer = 2 if self.shape.value_dim else 1
        numbers = range(self.shape.layers) if layers is None else layers
        return [
            self.planes[layer * per_layer + part] for layer in numbers for part in range(per_layer)
        ]

    def put(self, block: int, row: torch.Tensor, layers: range | None = None) -> None:
        """Overwrite a block with a row's bytes."""
        for plane in self.of(layers):
            size = plane[block].numel()
            plane[block] = row[:size].view(plane[block].shape)
            row = row[size:]

    def put_tokens(self, block: int, other: Cache, source: int, count: int, layers: range) -> None:
        """Overwrite the first tokens with those of a block of `other`."""
        for mine, theirs in zip(self.of(layers), other.of(layers), strict=True):
            if self.shape.layout == "NHD":
                mine[block, :count] = theirs[source, :count]
            else:
                mine[block, :, :count] = theirs[source, :, :count]

    # ------------------------------------------------------------------ forms

    def _strided(self, *lengths: int) -> torch.Tensor:
        """The next piece of memory, with gaps behind the entries of the outermost axes."""
        size = self.shape.dtype.itemsize
        strides = [1]
        for axis in range(len(lengths) - 1, 0, -1):
            gap = self.shape.gaps[axis - 1] if axis - 1 < len(self.shape.gaps) else 0
            strides.insert(0, strides[0] * lengths[axis] + gap)
        start = self.nbytes // size + self.shape.shift
        stop = start + strides[0] * lengths[0]
        # Each begins as far behind a multiple of 64 as the first one does.
        self.nbytes = -(-stop * size // 64) * 64
        self.tensors.append(self.memory[start * size : stop * size])
        return self.memory.view(self.shape.dtype).as_strided(lengths, strides, start)

    def _inner(self, dim: int) -> tuple[int, int, int]:
        shape = self.shape
        if shape.layout == "NHD":
            return shape.tokens, shape.heads, dim
        return shape.heads, shape.tokens, dim

    def _pool(self):
        shape = self.shape
        pool = self._strided(shape.blocks, shape.layers, 2, *self._inner(shape.key_dim))
        planes = [pool[:, layer, part] for layer in range(shape.layers) for part in (0, 1)]
        return PagedKv.from_pool(pool), planes

    def _flat(self):
        shape = self.shape
        layout = KvCacheLayout(
            shape.layers, shape.heads, shape.key_dim, shape.value_dim, shape.tokens, shape.dtype
        )
        pool = self._strided(*layout.flat_shape(shape.blocks))
        planes = []
        for layer in range(shape.layers):
            if layout.kv_factor == 2:
                parts = [(pool[:, layer, 0], shape.key_dim), (pool[:, layer, 1], shape.value_dim)]
            else:
                keys = prod(self._inner(shape.key_dim))
                both = pool[:, layer, 0]
                parts = [(both[:, :keys], shape.key_dim), (both[:, keys:], shape.value_dim)]
            for part, dim in parts:
                if dim:
                    step = shape.heads * dim
                    sizes = (shape.blocks, *self._inner(dim))
                    strides = (part.stride(0), step, dim, 1)
                    planes.append(part.as_strided(sizes, strides, part.storage_offset()))
        return PagedKv.from_pool(pool, layout), planes

    def _stacked(self):
        return self._whole_layers(2, self.shape.blocks)

    def _interleaved(self):
        return self._whole_layers(self.shape.blocks, 2)

    def _whole_layers(self, *outer):
        shape = self.shape
        inner = self._inner(shape.key_dim)
        layers = [self._strided(*outer, *inner) for _ in range(shape.layers)]
        axis = 0 if shape.form == "stacked" else 1
        planes = [layer.select(axis, part) for layer in layers for part in (0, 1)]
        return PagedKv.from_layers(layers, layout=shape.layout), planes

    def _pairs(self):
        shape = self.shape
        dims = (shape.key_dim, shape.value_dim)
        layers = [
            tuple(self._strided(shape.blocks, *self._inner(dim)) for dim in dims)
            for _ in range(shape.layers)
        ]
        planes = [plane for layer in layers for plane in layer]
        return PagedKv.from_layers(layers, layout=shape.layout), planes

    def _latent(self):
        shape = self.shape
        sizes = (shape.blocks, shape.tokens, shape.key_dim)
        layers = [self._strided(*sizes) for _ in range(shape.layers)]
        axis = 2 if shape.layout == "NHD" else 1
        planes = [layer.unsqueeze(axis) for layer in layers]
        return PagedKv.from_layers(layers, layout=shape.layout), planes


def forms_of(key_dim, value_dim):
    """The forms that a cache of rows of such dims can have."""
    if not value_dim:
        return ["flat", "latent"]
    if value_dim != key_dim:
        return ["flat", "pairs"]
    return ["pool", "flat", "stacked", "interleaved", "pairs"]


@st.composite
def shapes(draw, dtypes=DTYPES, blocks=(1, 3, 6)):
    """A cache's shape."""
    key_dim = draw(st.sampled_from([1, 5, 8, 16, 80, 96]))
    value_dim = draw(st.sampled_from([key_dim, key_dim, 3, 32, 0]))
    form = draw(st.sampled_from(forms_of(key_dim, value_dim)))
    return Shape(
        form=form,
        layout=draw(st.sampled_from(["NHD", "HND"])) if form in HND_FORMS else "NHD",
        dtype=(dtype := draw(st.sampled_from(dtypes))),
        layers=draw(st.integers(1, 3)),
        blocks=draw(st.sampled_from(blocks)),
        tokens=draw(st.sampled_from([2, 4, 16])),
        heads=1 if form == "latent" else draw(st.integers(1, 3)),
        key_dim=key_dim,
        value_dim=value_dim,
        gaps=draw(st.sampled_from(GAPS)),
        shift=draw(st.sampled_from([0, 16, 8, 4, dtype.itemsize])) // dtype.itemsize,
    )


@st.composite
def alike(draw, shape):
    """Another shape whose blocks can be copied from and to those of `shape`."""
    forms = forms_of(shape.key_dim, shape.value_dim)
    if shape.layout == "HND":
        forms = [form for form in forms if form in HND_FORMS]
    if shape.heads > 1:
        forms = [form for form in forms if form != "latent"]
    return replace(
        shape,
        form=draw(st.sampled_from(forms)),
        blocks=draw(st.sampled_from([1, 3, 6])),
        gaps=draw(st.sampled_from([(0, 0, 0), (8, 0, 0), (1, 2, 1)])),
    )


def layer_ranges(shape):
    """Some layers that follow each other; perhaps none."""
    return st.integers(0, shape.layers).flatmap(
        lambda stop: st.builds(range, st.integers(0, stop), st.just(stop))
    )


def ids(shape, *, unique=False, max_size=8):
    """Block ids with padding; without it each at most once if `unique`."""
    blocks = st.integers(0, shape.blocks - 1)
    if not unique:
        return st.lists(st.just(-1) | blocks, max_size=max_size)
    padded = st.tuples(
        st.lists(blocks, unique=True, max_size=max_size), st.lists(st.just(-1), max_size=2)
    )
    return padded.flatmap(lambda both: st.permutations(both[0] + both[1]))
