"""The description that an instance sends when a connection opens: its model and its pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout, StateTensor
from kvconnect.transfer.control.fields import MAX_ENTRIES, Name, Number32, Record

if TYPE_CHECKING:
    import torch

PROTOCOL = 3
"""The version of the protocol; peers of another version are refused."""


class Compat(Record):
    """The properties that must be equal on both sides, so that blocks mean the same on both.

    Attributes:
        model: identifies configuration and weights, by their digest or by id and revision.
        dtype: the dtype of keys and values in the pool.
        num_layers, num_kv_heads, key_dim, value_dim: the sizes of the model, all ranks together.
        block_format: the version of a block's layout in memory.
        transport: the name of the transport that reads the blocks.
    """

    model: Name
    dtype: Name
    num_layers: Number32
    num_kv_heads: Number32
    key_dim: Number32
    value_dim: Number32
    block_format: Number32
    transport: Name


class StateInfo(Record):
    """A tensor of a recurrent layer's state; the fields are those of `StateTensor`."""

    layer: Number32
    name: Name
    shape: Annotated[tuple[Number32, ...], Field(max_length=16)]
    dtype: Name


class PoolInfo(Record):
    """The memory of a pool group of the sender, which the receiver may read.

    Attributes:
        region: the number of the memory at the sender's transport.
        num_blocks: the number of blocks; block ids are below it.
        num_layers, num_kv_heads, key_dim, value_dim, tokens_per_block, dtype, window, layers,
            states: the layout of this rank's blocks, as in `KvCacheLayout`.
    """

    region: Number32
    num_blocks: Number32
    num_layers: Number32
    num_kv_heads: Number32
    key_dim: Number32
    value_dim: Number32
    tokens_per_block: Number32
    dtype: Name
    window: Number32 | None = None
    layers: Annotated[tuple[Number32, ...], Field(max_length=MAX_ENTRIES)] = ()
    states: Annotated[tuple[StateInfo, ...], Field(max_length=MAX_ENTRIES)] = ()

    @classmethod
    def of(cls, region: int, num_blocks: int, layout: KvCacheLayout) -> Self:
        """Returns the description of a pool of `num_blocks` blocks, registered as `region`."""
        return cls(
            region=region,
            num_blocks=num_blocks,
            dtype=_name(layout.dtype),
            states=tuple(
                StateInfo(layer=one.layer, name=one.name, shape=one.shape, dtype=_name(one.dtype))
                for one in layout.states
            ),
            **{field: getattr(layout, field) for field in _SAME_IN_LAYOUTS},
        )

    def layout(self) -> KvCacheLayout:
        """Returns the layout of the pool's blocks.

        Raises:
            ConfigurationError: a field has a value that no layout can have; the message names it.
        """
        return KvCacheLayout(
            dtype=_dtype(self.dtype),
            states=tuple(
                StateTensor(one.layer, one.name, one.shape, _dtype(one.dtype))
                for one in self.states
            ),
            **self.model_dump(include=_SAME_IN_LAYOUTS),
        )


_SAME_IN_LAYOUTS = KvCacheLayout.__dataclass_fields__.keys() - {"dtype", "states"}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    """Returns the dtype that `_name` returned `name` of.

    Raises:
        ConfigurationError: there is no such dtype here.
    """
    import torch

    dtype: torch.dtype | None = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"dtype: '{name}' of a peer's pool is unknown here")
    return dtype
