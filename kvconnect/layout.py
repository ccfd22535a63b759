"""The shape of one KV block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from math import lcm, prod
from typing import TYPE_CHECKING, Literal

from kvconnect.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = ["KvCacheLayout", "StateTensor"]

_ALIGNMENT = 16
"""Every state tensor begins at a multiple of so many bytes, so that any dtype can view it."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of the state of a recurrent layer, for one sequence.

    Attributes:
        layer: the model's number of the layer.
        name: the tensor's name, unique in its layer: ``conv``, ``recurrent``.
        shape: the shape of one sequence's tensor, without a batch dimension.
        dtype: dtype of the elements.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """The layout of a block of one pool group. One block is one contiguous run of bytes.

    With ``key_dim == value_dim`` the pool is ``[num_blocks, num_layers, 2, tokens_per_block,
    num_kv_heads, head_dim]`` and `kv_factor` is 2. Where they differ (MLA) `kv_factor` is 1 and the
    last axis holds ``tokens_per_block * num_kv_heads * (key_dim + value_dim)`` elements, keys
    first.

    A layout of states (`of_states`) is for recurrent layers. One block is one snapshot: the states
    of all these layers after the last token of the block. Its pool is a sliding window of one
    block, so that a match needs the block that ends there and none before. `key_dim` is a layer's
    bytes divided by `tokens_per_block`.

    Attributes:
        num_layers: attention layers in this group, or recurrent ones.
        num_kv_heads: KV heads of each layer (of this rank).
        key_dim, value_dim: elements of one head's key and value.
        tokens_per_block: at least 2.
        dtype: of the elements.
        window: attention window in tokens; ``None`` is full attention.
        layers: the model's numbers of these layers, ascending; ``()``: 0 to ``num_layers - 1``.
        states: the tensors of a block of states, by layer; ``()`` in a layout of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    tokens_per_block: int
    dtype: torch.dtype
    window: int | None = None
    layers: tuple[int, ...] = ()
    states: tuple[StateTensor, ...] = ()

    @classmethod
    def of_states(cls, states: Sequence[StateTensor], tokens_per_block: int) -> KvCacheLayout:
        """Returns the layout of snapshots of these state tensors, which are in order of the layers.

        Raises:
            ConfigurationError: there are none, or they are not in order, or a name is twice in one
                layer.
        """
        import torch

        by_layer = [list(tensors) for _, tensors in groupby(states, key=lambda one: one.layer)]
        unit = lcm(_ALIGNMENT, tokens_per_block)
        largest = max((_extent(tensors) for tensors in by_layer), default=0)
        return cls(
            num_layers=len(by_layer),
            num_kv_heads=1,
            key_dim=-(-largest // unit) * unit // tokens_per_block,
            value_dim=0,
            tokens_per_block=tokens_per_block,
            dtype=torch.uint8,
            window=tokens_per_block,
            layers=tuple(tensors[0].layer for tensors in by_layer),
            states=tuple(states),
        )

    @classmethod
    def of_counts(cls, tokens_per_block: int, dtype: torch.dtype) -> KvCacheLayout:
        """Returns the layout of a model without attention: its blocks only count tokens."""
        return cls(
            num_layers=1,
            num_kv_heads=1,
            key_dim=1,
            value_dim=0,
            tokens_per_block=tokens_per_block,
            dtype=dtype,
        )

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "key_dim"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.value_dim < 0:
            raise ConfigurationError(f"value_dim: {self.value_dim} must be at least 0")
        if self.window is not None and self.window < 1:
            raise ConfigurationError(f"window: {self.window} must be at least 1, or None")
        in_order = all(before < after for before, after in pairwise((-1, *self.layers)))
        if self.layers and (len(self.layers) != self.num_layers or not in_order):
            raise ConfigurationError(
                f"layers: {self.layers} must be {self.num_layers} layer numbers in ascending order"
            )
        t = self.tokens_per_block
        if t < 2:
            raise ConfigurationError(f"tokens_per_block: {t} must be at least 2")
        if self.states:
            self._check_states()

    def _check_states(self) -> None:
        named = {(one.layer, one.name) for one in self.states}
        if len(named) != len(self.states) or {one.layer for one in self.states} != set(self.layers):
            raise ConfigurationError(
                "states: each layer has at least one tensor, and no two tensors of a layer have "
                "one name"
            )
        fits = all(
            _extent([one for one in self.states if one.layer == layer]) <= self.layer_nbytes
            for layer in self.layers
        )
        if self.window != self.tokens_per_block or self.dtype.itemsize != 1 or not fits:
            raise ConfigurationError("states: make their layout with KvCacheLayout.of_states")

    @property
    def kind(self) -> Literal["kv", "latent", "state"]:
        """Returns what a block holds: keys and values, latents of MLA, or a recurrent state."""
        if self.states:
            return "state"
        return "latent" if self.num_kv_heads == 1 and self.value_dim == 0 else "kv"

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The model's number of each layer."""
        return self.layers or tuple(range(self.num_layers))

    @property
    def is_latent(self) -> bool:
        """Returns whether it holds latents: one head's keys, of which all keys and values are made.

        Every rank holds them whole, whatever the tensor parallelism.
        """
        return self.kind == "latent"

    @property
    def only_counts(self) -> bool:
        """Returns whether no content of a block is ever read, see `of_counts`."""
        return not self.states and self == self.of_counts(self.tokens_per_block, self.dtype)

    @property
    def kv_factor(self) -> int:
        """The number of planes: 2 where keys and values have equal shape, else 1."""
        return 2 if self.key_dim == self.value_dim else 1

    @property
    def plane_elements(self) -> int:
        """The elements of one layer's plane of a block: the last axis of the flat pool view."""
        dim = self.key_dim if self.kv_factor == 2 else self.key_dim + self.value_dim
        return self.tokens_per_block * self.num_kv_heads * dim

    @property
    def layer_nbytes(self) -> int:
        """The bytes of one layer of a block."""
        return self.kv_factor * self.plane_elements * self.dtype.itemsize

    @property
    def block_nbytes(self) -> int:
        """The bytes of one block, all layers, keys and values."""
        return self.num_layers * self.layer_nbytes

    @property
    def token_nbytes(self) -> int:
        """The bytes of one token, all layers, keys and values."""
        return self.block_nbytes // self.tokens_per_block

    def flat_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Returns the shape of the flat pool view that connectors get."""
        return (num_blocks, self.num_layers, self.kv_factor, self.plane_elements)

    def state_offsets(self, layer: int) -> Iterator[tuple[StateTensor, int]]:
        """Yields the state tensors of the model's layer `layer`, each with its first byte."""
        at = 0
        for one in self.states:
            if one.layer == layer:
                yield one, at
                at = _aligned(at + one.nbytes)

    def divided(self, most_nbytes: int = 4 << 20) -> tuple[KvCacheLayout, ...]:
        """Returns the layouts of the parts in which stores keep a block, in order of the layers.

        A part of a block of states has at most `most_nbytes` bytes, and one layer at least. All
        staging memory is made of slots for the largest part of any group, and a block of states is
        often as large as a hundred blocks of keys and values. Those are not divided.
        """
        step = max(1, most_nbytes // self.layer_nbytes)
        if not self.states or self.num_layers <= step:
            return (self,)
        parts = [self.layers[first : first + step] for first in range(0, self.num_layers, step)]
        return tuple(
            replace(
                self,
                num_layers=len(layers),
                layers=layers,
                states=tuple(one for one in self.states if one.layer in layers),
            )
            for layers in parts
        )

    def fingerprint(self) -> bytes:
        """Returns 16 bytes that differ whenever any field does; the same in every process."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.layer_numbers == tuple(range(self.num_layers)):
            del named["layers"]  # one pool for all layers: an older fingerprint
        if not self.states:
            del named["states"]  # the fingerprint from before there were layouts of states
        text = ";".join(f"{name}={value}" for name, value in named.items())
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _extent(tensors: Sequence[StateTensor]) -> int:
    """Returns the bytes of the tensors of one layer, one aligned after the other."""
    return sum(_aligned(one.nbytes) for one in tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
