"""Small random heads that draft from a model's hidden states: EAGLE, EAGLE3, MTP."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def write_eagle(directory: Path, layer: Path) -> Path:
    """Writes an EAGLE head whose layer is the only one of the Llama in `layer`."""
    weights = _layer_weights(layer, "model.layers.0.", "layers.0.")
    del weights["layers.0.input_layernorm.weight"]  # the head has none
    hidden = len(weights["layers.0.post_attention_layernorm.weight"])
    return _write(directory, layer, weights | {"fc.weight": _random(hidden, 2 * hidden)})


def write_eagle3(directory: Path, layer: Path) -> Path:
    """Writes an EAGLE3 head: its layer sees embeddings beside hidden states of three layers."""
    weights = _layer_weights(layer, "model.layers.0.", "midlayer.")
    hidden = len(weights["midlayer.input_layernorm.weight"])
    for name in ("q", "k", "v"):
        key = f"midlayer.self_attn.{name}_proj.weight"
        weights[key] = torch.cat([weights[key], weights[key].flip(0)], dim=1)
    vocab = json.loads((layer / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return _write(
        directory,
        layer,
        weights
        | {
            "midlayer.hidden_norm.weight": torch.ones(hidden),
            "norm.weight": torch.ones(hidden),
            "fc.weight": _random(hidden, 3 * hidden),
            "lm_head.weight": _random(vocab, hidden),
        },
    )


def add_mtp(model: Path, layer: int) -> Path:
    """Adds an MTP layer to the Qwen3-Next in `model`: a copy of its attention layer `layer`."""
    path = model / "model.safetensors"
    weights = load_file(path)
    own = {
        name.replace(f"model.layers.{layer}.", "mtp.layers.0."): one.clone()
        for name, one in weights.items()
        if name.startswith(f"model.layers.{layer}.")
    }
    norm = own["mtp.layers.0.input_layernorm.weight"]
    own["mtp.fc.weight"] = _random(len(norm), 2 * len(norm)).to(norm.dtype)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        own[f"mtp.{name}.weight"] = norm.clone()
    save_file(weights | own, path, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def write_ernie_mtp(directory: Path) -> Path:
    """Writes an Ernie4.5-MoE in bfloat16 with an MTP layer, which is a copy of its first layer."""
    config = AutoConfig.for_model(
        "ernie4_5_moe",
        vocab_size=260,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        moe_intermediate_size=64,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
        initializer_range=0.2,
        num_nextn_predict_layers=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(directory)
    own = _layer_weights(directory, "model.layers.0.", "model.mtp_block.0.")
    norm = own["model.mtp_block.0.input_layernorm.weight"]
    own["model.mtp_linear_proj.0.weight"] = _random(len(norm), 2 * len(norm)).to(norm.dtype)
    for name in ("mtp_emb_norm", "mtp_hidden_norm"):
        own[f"model.{name}.0.weight"] = norm.clone()
    path = directory / "model.safetensors"
    save_file(load_file(path) | own, path, metadata={"format": "pt"})
    return directory


def _layer_weights(model: Path, prefix: str, new: str) -> dict[str, Tensor]:
    weights = load_file(model / "model.safetensors")
    return {
        name.replace(prefix, new): one.clone()
        for name, one in weights.items()
        if name.startswith(prefix)
    }


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * 0.1


def _write(directory: Path, layer: Path, weights: dict[str, Tensor]) -> Path:
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((layer / "config.json").read_bytes())
    return directory
