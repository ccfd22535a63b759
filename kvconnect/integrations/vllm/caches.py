"""The KV cache tensors of vLLM as planes of keys and values, and the trials of its CPU kernels."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from kvconnect.connector.io.strided import StridedPlanes
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.memory import planes_of, split_blocks
from kvconnect.integrations.vllm.layouts import CacheGroup
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout

Packing: TypeAlias = Literal["rows", "transposed", "opaque"] | None
"""How vLLM's CPU kernels hold the keys of one head of a block: token by token, dimension by
dimension, or in an order of their own. ``None``: these kernels are not used."""


def group_planes(
    groups: Sequence[CacheGroup],
    kv_caches: Mapping[str, Tensor],
    num_blocks: int,
    *,
    packing: Packing = None,
) -> list[PagedKv | StridedPlanes]:
    """Returns the planes of each group, in its order, as views of the tensors.

    Args:
        groups: the groups in vLLM's configuration.
        kv_caches: what vLLM registers: by layer name ``[num_blocks, heads, tokens, keys|values]``
            of any strides, ``[2, num_blocks, tokens, heads, dim]``, of a latent ``[num_blocks,
            tokens, dim]``, or of states ``[num_blocks, 1, 1, bytes]``.
        num_blocks: of the pool.
        packing: of the CPU's kernels, which hold all keys of a head before all its values.

    Raises:
        ConfigurationError: a layer has no tensor, or its shape or strides do not fit.
    """
    found = []
    for group in groups:
        layers = []
        for name in group.layer_names:
            if name not in kv_caches:
                raise ConfigurationError(f"KvConnect: layer '{name}' has no KV cache tensor")
            layers.append(_layer(kv_caches[name], group, num_blocks, packing, f"layer '{name}'"))
        found.append(
            planes_of(layers, group.layout, num_blocks, name=f"KvConnect: {group.layer_names[0]} …")
        )
    return found


def _layer(
    cache: Tensor, group: CacheGroup, num_blocks: int, packing: Packing, name: str
) -> tuple[Tensor, Tensor] | tuple[Tensor]:
    if group.layout.kind == "state":
        return (_states(cache, group, num_blocks, name),)
    if group.layout.is_latent:
        return (_latent(cache, num_blocks, name),)
    if cache.ndim == 5 and 2 in cache.shape[:2] and cache.shape[:2] != (2, 2):
        keys, values = cache.unbind(0 if cache.shape[0] == 2 else 1)
        return split_blocks(keys, num_blocks, name=name), split_blocks(
            values, num_blocks, name=name
        )
    layout = group.layout
    width = layout.key_dim + layout.value_dim
    if cache.ndim != 4 or cache.shape[3] != width:
        raise ConfigurationError(
            f"KvConnect: {name}: a KV cache of shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}; [num_blocks, heads, tokens, {width}] is served"
        )
    if packing is not None:
        return _of_cpu(cache, layout.tokens_per_block, packing, name)
    by_token = split_blocks(cache.transpose(1, 2), num_blocks, name=name)
    return by_token[..., : layout.key_dim], by_token[..., layout.key_dim :]


def _states(cache: Tensor, group: CacheGroup, num_blocks: int, name: str) -> Tensor:
    """Returns the pages of a layer's states as rows of bytes, ``[num_blocks, tokens, 1, dim]``.

    The last row may end in the bytes that fill vLLM's page: no other layer has them in this block.
    """
    layout, page = group.layout, cache.stride(0)
    content = layout.states[0].nbytes
    if (
        tuple(cache.shape) != (num_blocks, 1, 1, content)
        or cache.element_size() != 1
        or cache.stride(3) != 1
        or page < group.page_nbytes
    ):
        raise ConfigurationError(
            f"KvConnect: {name}: states of shape {tuple(cache.shape)}, strides {cache.stride()} "
            f"and {cache.dtype}; bytes [{num_blocks}, 1, 1, {content}] in pages of "
            f"{group.page_nbytes} bytes are served"
        )
    dim = layout.key_dim
    shape, stride = (num_blocks, layout.tokens_per_block, 1, dim), (page, dim, dim, 1)
    return torch.as_strided(cache.view(torch.uint8), shape, stride, cache.storage_offset())


def _latent(cache: Tensor, num_blocks: int, name: str) -> Tensor:
    if cache.ndim == 4 and cache.shape[1] == 1:
        cache = cache.squeeze(1)
    if cache.ndim != 3:
        raise ConfigurationError(
            f"KvConnect: {name}: a latent KV cache of shape {tuple(cache.shape)}; "
            "[num_blocks, tokens, dim] is served"
        )
    return split_blocks(cache, num_blocks, name=name).unsqueeze(2)


def _of_cpu(
    cache: Tensor, tokens_per_block: int, packing: Packing, name: str
) -> tuple[Tensor, Tensor]:
    blocks, heads, tokens, width = cache.shape
    dim = width // 2
    if tokens != tokens_per_block or cache.stride()[2:] != (width, 1):
        raise ConfigurationError(
            f"KvConnect: {name}: a KV cache of shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}; the CPU's kernels hold each head of a block in one piece"
        )
    halves = cache.view(blocks, heads, 2, tokens * dim)
    keys, values = halves.unbind(2)
    by_head = values.view(blocks, heads, tokens, dim)
    if packing == "transposed":
        return keys.view(blocks, heads, dim, tokens).permute(0, 3, 1, 2), by_head.transpose(1, 2)
    return keys.view(blocks, heads, tokens, dim).transpose(1, 2), by_head.transpose(1, 2)


def cpu_packing(layout: KvCacheLayout) -> Packing:
    """Returns the order of a block's keys; ``None`` if vLLM is not on the CPU or keeps a latent.

    Writes one block of random keys into memory of its own with vLLM's kernel, and examines the
    result. An order that is neither by token nor by dimension is the kernel's own. Such blocks are
    stored unchanged, for engines with the same kernel.

    Args:
        layout: the layout of the blocks.
    """
    platforms: Any = importlib.import_module("vllm.platforms")
    if not platforms.current_platform.is_cpu() or layout.value_dim != layout.key_dim:
        return None
    backend: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    ops: Any = importlib.import_module("vllm._custom_ops")
    size, heads, dim = layout.tokens_per_block, layout.num_kv_heads, layout.key_dim
    isa = backend._get_attn_isa(layout.dtype, size, dim)  # noqa: SLF001  there is no public name
    keys, values = (_random(size, heads, dim, layout.dtype, seed) for seed in (1, 2))
    block = torch.zeros(1, heads, 2, size * dim, dtype=layout.dtype)
    caches = block.view(1, heads, 2 * size, dim).chunk(2, dim=2)
    slots = torch.arange(size, dtype=torch.int64)
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    ops.cpu_attn_reshape_and_cache(keys, values, *caches, slots, isa, **scales)
    stored_keys, stored_values = block[0].unbind(1)
    if not torch.equal(stored_values.view(heads, size, dim), values.transpose(0, 1)):
        return "opaque"
    if torch.equal(stored_keys.view(heads, size, dim), keys.transpose(0, 1)):
        return "rows"
    if torch.equal(stored_keys.view(heads, dim, size), keys.permute(1, 2, 0)):
        return "transposed"
    return "opaque"


def base_is_apart(vllm_config: Any) -> bool:
    """Returns whether requests without an adapter are unaffected by adapters in their batch.

    False on the CPU up to vLLM 0.33: its kernels read -1, the index of no adapter, as the index of
    the last one (vLLM's pull request 48421).

    Args:
        vllm_config: vLLM's.
    """
    platforms: Any = importlib.import_module("vllm.platforms")
    if getattr(vllm_config, "lora_config", None) is None or not platforms.current_platform.is_cpu():
        return True
    ops: Any = importlib.import_module("vllm.lora.ops.torch_ops")
    weights, no_adapter = torch.ones(1, 1, 1), torch.tensor([-1])
    shrunk, delta = torch.zeros(1, 1), torch.zeros(1, 1)
    ops.bgmv_shrink(torch.ones(1, 1), weights, shrunk, no_adapter, 1.0)
    ops.bgmv_expand(shrunk, weights, delta, no_adapter, add_inputs=True)
    return not bool(delta.any())


def _random(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, dim, generator=generator).to(dtype)
