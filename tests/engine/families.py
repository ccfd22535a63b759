"""Tiny random models of every family of transformers' causal LMs.

A configuration keeps what its family sets by default (kinds of layers, norms, biases, sinks) and
has small dimensions. Weights are large, and none is zero or one, so that whatever attention leaves
out shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.models.inkling2.modeling_inkling2 import Inkling2TopKRouter

__all__ = ["VOCAB_SIZE", "FirstOfEquals", "computed_in", "model_types", "tiny_config", "write_tiny"]

VOCAB_SIZE = 320

_LAYERS = 4

# The value of every field that a family's configuration has.
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "max_target_positions": 512,
    "sliding_window": 24,
    "initializer_range": 0.25,
    "init_std": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "zero_expert_num": 2,
    # latents
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 8,
    "index_topk": 16,
    # other kinds of heads
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_chunk_size": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "n_mamba_heads": 8,
    "mamba_headdim": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "n_groups": 1,
    "num_heads": 8,
    "lru_width": 64,
    "d_rel": 8,
    "rel_extent": 64,
    "dim_model_base": 64,
    "word_embed_proj_dim": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "d_model": 64,
    "ffn_dim": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 0,
    "rotary_dim": 8,
}

# The fields whose general value does not suit a family.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "camembert": {"is_decoder": True},
    "data2vec-text": {"is_decoder": True},
    "electra": {"is_decoder": True},
    "ernie": {"is_decoder": True},
    "megatron-bert": {"is_decoder": True},
    "rembert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "roberta-prelayernorm": {"is_decoder": True},
    "roc_bert": {"is_decoder": True},
    "roformer": {"is_decoder": True},
    "xlm-roberta": {"is_decoder": True},
    "xlm-roberta-xl": {"is_decoder": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dots1": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_shared_experts": 1,
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 48,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "llama4_text": {"attention_chunk_size": 24},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 24},
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [32, 32],
    },
    "xlnet": {"d_head": 16},
    "xlstm": {"hidden_size": 128, "chunk_size": 16},
    # Recurrent layers between the others. transformers' Zamba2 and Nemotron-H apply the least time
    # step to the tokens of a prompt, and not to generated ones: it is too small to matter here.
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "inkling_text": {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"]},
    "inkling2_text": {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "mamba2": {"chunk_size": 16},
    "minimax": {"block_size": 16, "sliding_window": None},
    "nemotron_h": {"chunk_size": 16, "sliding_window": None, "time_step_min": 1e-9},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "chunk_size": 16,
        "num_key_value_heads": 4,
        "mamba_d_state": 16,
        "time_step_min": 1e-9,
    },
    "zaya": {"num_experts_per_tok": 1},
}


@contextmanager
def computed_in(dtype: torch.dtype, family: str) -> Iterator[None]:
    """Makes transformers compute a family in `dtype`, float64, if it does not by itself.

    XGLM computes in it if that is torch's default; the router of Inkling 2 takes float32 only.
    """
    before = torch.get_default_dtype()
    route = Inkling2TopKRouter.forward

    def in_float32(self: Inkling2TopKRouter, hidden_states: torch.Tensor) -> Any:
        self.weight.data = self.weight.data.float()
        return route(self, hidden_states)

    try:
        if family == "xglm":
            torch.set_default_dtype(dtype)
        Inkling2TopKRouter.forward = in_float32
        yield
    finally:
        torch.set_default_dtype(before)
        Inkling2TopKRouter.forward = route


def model_types() -> list[str]:
    """Returns the model types that transformers has a causal LM of text for."""
    return sorted(
        {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING if not config.sub_configs}
    )


def tiny_config(model_type: str, **more: Any) -> PreTrainedConfig:
    """Returns the family's configuration with small dimensions, and the fields `more`."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    names = {*default.to_dict(), *getattr(default, "attribute_map", {})}
    fields = {name: value for name, value in _SIZES.items() if name in names}
    for source, target in getattr(default, "attribute_map", {}).items():
        if source in fields and target in fields:
            del fields[target]
    if "qk_rope_head_dim" in fields and "head_dim" in fields:
        fields["head_dim"] = fields["qk_rope_head_dim"]  # the part of a key that is turned
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    layers = getattr(default, "layer_types", None)
    if layers:
        kinds = list(dict.fromkeys(layers))
        if "layer_types" in default.to_dict():
            fields["layer_types"] = [kinds[i % len(kinds)] for i in range(_LAYERS)]
    return kind(**fields | dict(_FIELDS.get(model_type, {})) | more)


def write_tiny(directory: Path, model_type: str, **more: Any) -> Path:
    """Writes a random model of a family to `directory` and returns it."""
    config = tiny_config(model_type, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim < 2:  # norms, biases, sinks: zeros and ones at first
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(directory)
    return directory


class FirstOfEquals(TorchFunctionMode):
    """Of equal values `topk` takes the first ones. Its kernels take any."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in {torch.topk, torch.Tensor.topk}:
            return self._topk(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    @staticmethod
    def _topk(values, k, dim=-1, **_):
        ordered = values.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk([one.narrow(dim, 0, k) for one in ordered])
