"""The trials of vLLM's CPU kernels when an engine starts: stored keys, and LoRA adapters."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kvconnect.integrations.vllm.caches import Packing
from kvconnect.layout import KvCacheLayout

__all__ = ["base_is_apart", "cpu_packing"]


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
