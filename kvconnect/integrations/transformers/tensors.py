"""The keys and values of transformers' caches as blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout

LayerTensors = tuple[Tensor, Tensor]
"""A layer's keys and values, ``[batch, tokens, heads, dim]`` each, of any strides."""


def new_layers(
    layouts: Sequence[KvCacheLayout],
    *,
    batch: int,
    num_tokens: int,
    device: torch.device,
    zeroed: bool,
) -> dict[int, LayerTensors]:
    """Returns memory for `num_tokens` tokens of each attention layer, by the layer's number.

    A block is one contiguous piece of it for each layer, which is fast to copy.
    """
    made = torch.zeros if zeroed else torch.empty
    layers: dict[int, LayerTensors] = {}
    for layout in layouts:
        for number in layout.layer_numbers if layout.kind != "state" else ():
            keys, values = (
                made(
                    (batch, num_tokens, layout.num_kv_heads, dim),
                    dtype=layout.dtype,
                    device=device,
                )
                for dim in (layout.key_dim, layout.value_dim)
            )
            layers[number] = (keys, values)
    return dict(sorted(layers.items()))


def as_blocks(
    layers: Mapping[int, LayerTensors], layout: KvCacheLayout, row: int, tokens: range
) -> PagedKv:
    """Returns the whole blocks of a pool group that these `tokens` of a `row` fill."""
    size = layout.tokens_per_block
    views = [
        torch.unflatten(tensor[row, tokens.start : tokens.stop], 0, (len(tokens) // size, size))
        for number in layout.layer_numbers
        for tensor in layers[number]
    ]
    return PagedKv.from_views(views, per_layer=2)


def tail_block(
    layers: Mapping[int, LayerTensors], layout: KvCacheLayout, row: int, tokens: range
) -> PagedKv:
    """Returns a block of a copy of these `tokens`, fewer than fill it, and then zeros."""
    views = []
    for number in layout.layer_numbers:
        for tensor in layers[number]:
            block = tensor.new_zeros((1, layout.tokens_per_block, *tensor.shape[2:]))
            block[0, : len(tokens)] = tensor[row, tokens.start : tokens.stop]
            views.append(block)
    return PagedKv.from_views(views, per_layer=2)


def state_block(snapshot: Tensor, layout: KvCacheLayout, row: int) -> PagedKv:
    """Returns the snapshot of a `row`, of `states.new_snapshot`, as a block."""
    return PagedKv.from_pool(snapshot[row : row + 1], layout)
