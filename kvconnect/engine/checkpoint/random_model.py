"""Makes small random models of many architectures, for tests and demonstrations.

They are made without downloads. The weights are large, so that a damaged KV cache changes the
output and is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from kvconnect.config import torch_dtype
from kvconnect.errors import ConfigurationError, nearest

_EOS_ID, _BOS_ID, _PAD_ID = 256, 257, 258
_VOCAB_SIZE = 260

_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def _write_byte_tokenizer(directory: Path, *, model_max_length: int) -> None:
    """Writes ``tokenizer.json``, its configuration and a chat template to `directory`."""
    # Byte-level BPE names byte b by a printable character: bytes that are printable in latin-1
    # stand for themselves, the others are moved up behind them, in order.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + index): byte for index, byte in enumerate(others)}
    specials = {"</s>": _EOS_ID, "<s>": _BOS_ID, "<pad>": _PAD_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | specials, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="</s>",  # noqa: S106  no secret
        bos_token="<s>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(directory)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The dimensions that all architectures share."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 128
    max_position_embeddings: int = 512
    sliding_window: int = 24

    @property
    def head_dim(self) -> int:
        """The elements of one head."""
        return self.hidden_size // self.num_heads


PRESETS: Mapping[str, ModelSize] = {
    "tiny": ModelSize(),
    # 46 million parameters: large enough that a long prompt takes seconds on two cores.
    "demo": ModelSize(
        hidden_size=512,
        num_layers=12,
        num_heads=8,
        num_kv_heads=2,
        intermediate_size=2048,
        max_position_embeddings=32768,
    ),
}


def _common(size: ModelSize) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "intermediate_size": size.intermediate_size,
        "max_position_embeddings": size.max_position_embeddings,
    }


def _grouped(size: ModelSize) -> dict[str, Any]:
    return _common(size) | {"num_key_value_heads": size.num_kv_heads}


def _with_head_dim(size: ModelSize) -> dict[str, Any]:
    return _grouped(size) | {"head_dim": size.head_dim}


def _sliding(size: ModelSize) -> dict[str, Any]:
    return _with_head_dim(size) | {"sliding_window": size.sliding_window}


def _gemma3(size: ModelSize) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    return _sliding(size) | {
        "layer_types": [kinds[layer % 2] for layer in range(size.num_layers)],
        "query_pre_attn_scalar": size.head_dim,
    }


def _mixtral(size: ModelSize) -> dict[str, Any]:
    return _with_head_dim(size) | {"num_local_experts": 4, "num_experts_per_tok": 2}


def _gpt2(size: ModelSize) -> dict[str, Any]:
    return {
        "n_embd": size.hidden_size,
        "n_layer": size.num_layers,
        "n_head": size.num_heads,
        "n_inner": size.intermediate_size,
        "n_positions": size.max_position_embeddings,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _opt(size: ModelSize) -> dict[str, Any]:
    common = _common(size)
    common["ffn_dim"] = common.pop("intermediate_size")
    return common | {"word_embed_proj_dim": size.hidden_size}


def _deepseek_v3(size: ModelSize) -> dict[str, Any]:
    # Keys of 24 and values of 16 for a head of 16: the two differ, as in the real model.
    return _common(size) | {
        "num_key_value_heads": size.num_heads,
        "q_lora_rank": None,
        "kv_lora_rank": 2 * size.head_dim,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.head_dim // 2,
        "v_head_dim": size.head_dim,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": size.intermediate_size // 2,
        "first_k_dense_replace": 1,
    }


ARCHITECTURES: Mapping[str, tuple[str, Callable[[ModelSize], dict[str, Any]]]] = {
    "llama": ("llama", _grouped),
    "qwen2": ("qwen2", _grouped),
    "qwen3": ("qwen3", _with_head_dim),
    "mistral": ("mistral", _sliding),
    "mixtral": ("mixtral", _mixtral),
    "phi": ("phi", _grouped),
    "gemma": ("gemma", _with_head_dim),
    "gemma3": ("gemma3_text", _gemma3),
    "olmo": ("olmo", _grouped),
    "gpt2": ("gpt2", _gpt2),
    "gpt_neox": ("gpt_neox", _common),
    "opt": ("opt", _opt),
    "deepseek_v3": ("deepseek_v3", _deepseek_v3),
}
"""The architectures by name: the transformers model type, and the fields of its configuration."""


def make_model(
    directory: str | Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    preset: str = "tiny",
    dtype: str = "float32",
    initializer_range: float | None = None,
    config_overrides: Mapping[str, Any] | None = None,
    **size: int,
) -> Path:
    """Writes a random model with a byte-level tokenizer to `directory` and returns it.

    Equal arguments write equal weights.

    Args:
        directory: made if it does not exist; files of a model already there are overwritten.
        arch: a key of `ARCHITECTURES`.
        seed: the random seed of the weights.
        preset: a key of `PRESETS`, the dimensions to start from.
        dtype: the dtype of the weights.
        initializer_range: standard deviation of the weights; default: large.
        config_overrides: more fields of the model's configuration.
        size: further keyword arguments, the fields of `ModelSize` that differ from the preset.

    Raises:
        ConfigurationError: an unknown architecture, preset, dtype or dimension.
    """
    if arch not in ARCHITECTURES:
        raise ConfigurationError(f"arch: '{arch}' is unknown; {nearest(arch, ARCHITECTURES)}")
    model_size = _model_size(preset, size)
    config = _model_config(arch, model_size, initializer_range, config_overrides or {})
    torch_type = torch_dtype(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=_BOS_ID, eos_token_id=_EOS_ID, pad_token_id=_PAD_ID
    )
    model.to(torch_type).save_pretrained(root)
    _write_byte_tokenizer(root, model_max_length=model_size.max_position_embeddings)
    return root


def _model_size(preset: str, size: Mapping[str, int]) -> ModelSize:
    if preset not in PRESETS:
        raise ConfigurationError(f"preset: '{preset}' is unknown; {nearest(preset, PRESETS)}")
    fields = ModelSize.__dataclass_fields__
    for name, value in size.items():
        if name not in fields:
            raise ConfigurationError(f"size: unknown field '{name}'; {nearest(name, fields)}")
        if value < 1:
            raise ConfigurationError(f"{name}: {value} must be at least 1")
    made = replace(PRESETS[preset], **size)
    if made.hidden_size % made.num_heads or made.num_heads % made.num_kv_heads:
        raise ConfigurationError(
            f"hidden_size={made.hidden_size} must be a multiple of num_heads={made.num_heads}, "
            f"and that of num_kv_heads={made.num_kv_heads}"
        )
    return made


def _model_config(
    arch: str,
    size: ModelSize,
    initializer_range: float | None,
    overrides: Mapping[str, Any],
) -> PreTrainedConfig:
    model_type, fields_of = ARCHITECTURES[arch]
    # Activations keep their scale with a deviation of 1/sqrt(hidden_size); this is beyond it.
    deviation = initializer_range or 2.0 / size.hidden_size**0.5
    fields: dict[str, Any] = {
        "vocab_size": _VOCAB_SIZE,
        "initializer_range": deviation,
        "bos_token_id": _BOS_ID,
        "eos_token_id": _EOS_ID,
        "pad_token_id": _PAD_ID,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(model_type, **fields | fields_of(size) | dict(overrides))
