"""What the adapters read of vLLM's configuration and of its KV cache groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def attention(kind: str = "FullAttentionSpec", **more: Any) -> Any:
    """A spec of keys and values."""
    values = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 8,
        "head_size_v": 8,
        "dtype": torch.float32,
        "sliding_window": None,
        "num_head_slots": None,
        "state_content_bytes": None,
        "num_heads": 2,
    }
    return type(kind, (), values | more)()


def groups_of(*groups: tuple[list[str], Any]) -> SimpleNamespace:
    """VLLM's ``KVCacheConfig`` of layers' names and their spec."""
    return SimpleNamespace(
        num_blocks=4,
        kv_cache_groups=[
            SimpleNamespace(layer_names=names, kv_cache_spec=one) for names, one in groups
        ],
    )


def engine_config(**more: Any) -> SimpleNamespace:
    """VLLM's ``VllmConfig`` of an engine on a GPU."""
    values = {
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "speculative_config": None,
        "load_config": SimpleNamespace(load_format="auto"),
        "model_config": SimpleNamespace(dtype=torch.float32, quantization=None, hf_overrides={}),
        "device_config": SimpleNamespace(device_type="cuda"),
    }
    return SimpleNamespace(**(values | more))
