"""Measures the bytes of KV cache that a model needs per token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvconnect.engine.model.latents import keep_latents
from kvconnect.engine.model.seam import ATTENTION, AttentionProbe
from kvconnect.errors import ConfigurationError, UnsupportedModel


def token_nbytes(directory: Path) -> int:
    """Returns the bytes of keys and values of one token in all layers, in the model's own dtype.

    Reads ``config.json`` and no weights: the model is built without memory, and one token is sent
    through it to see what each layer stores. A sliding window makes no difference here.

    Raises:
        ConfigurationError: the directory holds no model.
        UnsupportedModel: what it stores cannot be found out this way; the message says what to do.
    """
    if not (directory / "config.json").is_file():
        raise ConfigurationError(
            f"--model {directory}: there is no config.json; give a Hugging Face model directory, "
            "or --bytes-per-token"
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        dtype = getattr(config, "dtype", None) or torch.get_default_dtype()
        with torch.device("meta"):
            # Mixtures of experts run without memory in this type only; shapes do not depend on it.
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, attn_implementation=ATTENTION, dtype=torch.bfloat16).eval()
            zero = torch.zeros(1, 1, dtype=torch.int64)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--model {directory}: cannot be read: {error}") from error
    keep_latents(model)
    probe = AttentionProbe()
    try:
        with torch.inference_mode():
            model(input_ids=zero, position_ids=zero, use_cache=False, kv=probe)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise _unknown(directory, str(error).partition("\n")[0]) from error
    if len(probe.layers) != config.num_hidden_layers:
        raise _unknown(
            directory, f"{len(probe.layers)} of {config.num_hidden_layers} layers were seen"
        )
    elements = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in probe.layers)
    return elements * int(dtype.itemsize)


def _unknown(directory: Path, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"--model {directory}: its KV cache cannot be measured without its weights ({reason}); "
        "give --bytes-per-token"
    )
