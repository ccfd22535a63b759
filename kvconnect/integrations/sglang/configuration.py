"""The configuration that SGLang resolved, compared with the one of the model's files.

Keys cover the model's files. SGLang may interpret them otherwise than transformers, by its
settings, its environment or a plug-in. Such differences must be in the keys as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kvconnect.integrations.core.long_rope import config_of_directory

__all__ = ["changed_configuration", "pool_independent"]

# Fields that change no keys and values: labels, the class that they lead to, and limits.
_WITHOUT_EFFECT = {
    *("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"),
    *("context_len", "encoder_only", "language_only", "language_model_only"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
}


def changed_configuration(model_config: Any, directory: Path) -> str | None:
    """Returns a digest of the fields that SGLang resolved to other values than the files hold.

    Args:
        model_config: SGLang's ``ModelConfig``.
        directory: the directory of the model.

    Returns:
        ``None`` if every field of the files has its value in SGLang as well.
    """
    hf_config = getattr(model_config, "hf_config", None)
    if hf_config is None:
        return None
    changed = _differences(_of_files(directory), hf_config.to_dict())
    for name in _WITHOUT_EFFECT:
        changed.pop(name, None)
    if not changed:
        return None
    text = json.dumps(changed, sort_keys=True, default=str).encode()
    return hashlib.blake2b(text, digest_size=16, person=b"kvc-configured").hexdigest()


def pool_independent(model_config: Any, kv_dtype: str) -> str | None:
    """Returns the dtype that the model computes in, if keys do not imply it.

    Args:
        model_config: SGLang's ``ModelConfig``.
        kv_dtype: the dtype of the host pool's elements, which is in the keys.
    """
    computes = str(getattr(model_config, "dtype", "")).removeprefix("torch.")
    stored = getattr(getattr(model_config, "hf_config", None), "dtype", None)
    known = ("", kv_dtype, str(stored).removeprefix("torch."))
    return None if computes in known else computes


def _of_files(directory: Path) -> dict[str, Any]:
    """Returns the configuration as transformers reads it; the bare file for unknown kinds."""
    try:
        config = import_module("transformers").AutoConfig.from_pretrained(
            directory, local_files_only=True
        )
    except (ImportError, AttributeError, OSError, TypeError, ValueError, KeyError):
        return config_of_directory(directory)
    found: dict[str, Any] = config.to_dict()
    return found


def _differences(plain: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `plain` with other values in `resolved`, without added fields."""
    found: dict[str, Any] = {}
    for name, value in plain.items():
        if name not in resolved:
            continue  # another name for a field, or an unused field
        now = resolved[name]
        if isinstance(value, Mapping) and isinstance(now, Mapping):
            if inner := _differences(value, now):
                found[name] = inner
        elif now != value:
            found[name] = now
    return found
