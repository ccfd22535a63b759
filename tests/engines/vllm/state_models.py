"""Small random models with recurrent layers that vLLM's kernels on a CPU know."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

STATE_BLOCK = 96
"""Tokens of a block: vLLM makes the page of so many tokens as large as that of a state."""


def write_qwen3_next(directory: Path, *, heads: int = 1) -> Path:
    """Writes a Qwen3-Next in bfloat16, which the kernels demand, as they do heads of 128."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=260,
        hidden_size=128,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
