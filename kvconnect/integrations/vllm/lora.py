"""A test that calls vLLM's LoRA kernels, to see whether they leave other requests unchanged."""

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = ["base_is_apart"]


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
