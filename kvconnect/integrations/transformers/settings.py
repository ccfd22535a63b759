"""Settings of a model's configuration that shape keys and values."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["counts", "settings_of"]

# What from_pretrained sets, or what changes no key and no value.
_HARMLESS = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "name_or_path", "model_type", "id2label"),
    *("label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}


def settings_of(config: Any) -> dict[str, Any]:
    """Returns all settings of `config` that shape keys and values, and some that do not."""
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: _without_harmless(value) for name, value in settings.items() if counts(name)}


def counts(name: str) -> bool:
    """Returns whether a setting of this name may shape keys and values."""
    return name not in _HARMLESS and not name.startswith("_")


def _without_harmless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_harmless(each) for name, each in value.items() if counts(name)}
    return [_without_harmless(each) for each in value] if isinstance(value, list) else value
