"""The shape of one KV block."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

from kvconnect.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = ["KvCacheLayout"]


@dataclass(frozen=True, slots=True)
class KvCacheLayout:
    """The layout of a block of one pool group. One block is one contiguous run of bytes.

    With ``key_dim == value_dim`` the pool is ``[num_blocks, num_layers, 2, tokens_per_block,
    num_kv_heads, head_dim]`` and `kv_factor` is 2. Where they differ (MLA) `kv_factor` is 1 and the
    last axis holds ``tokens_per_block * num_kv_heads * (key_dim + value_dim)`` elements, keys
    first.

    Attributes:
        num_layers: attention layers in this group.
        num_kv_heads: KV heads of each layer (of this rank).
        key_dim, value_dim: elements of one head's key and value.
        tokens_per_block: a power of two greater than 1.
        dtype: of the elements.
        window: attention window in tokens; ``None`` is full attention.
        layers: the model's numbers of these layers, ascending; ``()``: 0 to ``num_layers - 1``.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    tokens_per_block: int
    dtype: torch.dtype
    window: int | None = None
    layers: tuple[int, ...] = ()

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
        if t < 2 or t & (t - 1):
            raise ConfigurationError(f"tokens_per_block: {t} must be a power of two greater than 1")

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The model's number of each layer."""
        return self.layers or tuple(range(self.num_layers))

    @property
    def is_latent(self) -> bool:
        """Returns whether it holds latents: one head's keys, of which all keys and values are made.

        Every rank holds them whole, whatever the tensor parallelism.
        """
        return self.num_kv_heads == 1 and self.value_dim == 0

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

    def fingerprint(self) -> bytes:
        """Returns 16 bytes that differ whenever any field does; the same in every process."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.layer_numbers == tuple(range(self.num_layers)):
            del named["layers"]  # one pool for all layers: an older fingerprint
        text = ";".join(f"{name}={value}" for name, value in named.items())
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
