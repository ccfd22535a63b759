"""The settings of the connector in TensorRT-LLM, checked against TensorRT-LLM's own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.core.configuration import (
    config_of_directory,
    original_length,
    refuse,
    refuse_elsewhere,
    rope_kinds,
)
from kvconnect.integrations.core.settings import EngineSettings

ENGINE = "trtllm"
VARIABLE = "KVCONNECT_CONFIG"

# TensorRT-LLM stands still meanwhile: beyond this time it is better to compute a prompt.
_LOAD_TIMEOUT_S = 2.0
# Blocks are saved in the step that fills them, and there are no producers.
_WITHOUT = ("save_on", "producer_timeout_s")
# A draft model's KV would be in the blocks, too, and depends on the token that follows.
_DRAFTS_WITHOUT_MODEL = ("ngram",)
# The formats whose weights are those of the model's directory.
_LOAD_FORMATS = ("none", "auto")
_CHECKPOINT_FORMATS = ("none", "hf", "mistral", "mistral_large_3")


def engine_settings(llm_args: object) -> EngineSettings:
    """Returns the settings of ``llm_args.kv_connector_config.kvconnect``, else of the environment.

    Raises:
        ConfigurationError: there are none, they are not JSON, or a field is wrong; names it.
    """
    own = getattr(getattr(llm_args, "kv_connector_config", None), "kvconnect", None)
    given: Any = own
    where = "kv_connector_config.kvconnect"
    if own is None:
        where, text = VARIABLE, os.environ.get(VARIABLE)
        if not text:
            raise ConfigurationError(
                f"{VARIABLE}: is not set; give it settings as JSON, for example "
                '\'{"url": "disk:///var/cache/kv?capacity=200GiB"}\''
            )
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"{VARIABLE}: is not JSON ({error})") from error
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}: must be an object of settings, with a url")
    settings = EngineSettings.of(
        ENGINE, {"load_timeout_s": _LOAD_TIMEOUT_S, **given}, where=where, without=_WITHOUT
    )
    if settings.is_shared:
        raise ConfigurationError(
            f"{where}.namespace: the order of bytes in TensorRT-LLM's blocks depends on its "
            "attention kernels, so they are not shared with other engines; leave it out"
        )
    return settings


def check_engine(llm_args: object, *, is_named: bool) -> None:
    """Refuses settings that a connector of TensorRT-LLM cannot serve correctly.

    Args:
        llm_args: TensorRT-LLM's.
        is_named: ``model_revision`` stands for the weights, wherever they come from.

    Raises:
        ConfigurationError: several ranks: a load that fails on one of them cannot be reported to
            the others; or the weights are not those of the model's directory, or need not stay so.
        UnsupportedModel: blocks have scales, or a draft model's KV, beside them.
    """
    names = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    sizes = {name: getattr(llm_args, name, 1) or 1 for name in names}
    refuse(
        {
            f"{name}={size}: TensorRT-LLM has no way to compute a prompt whose load failed on "
            "one of several ranks; kvconnect serves it on one rank": size > 1
            for name, size in sizes.items()
        }
    )
    _check_weights(llm_args, is_named=is_named)
    drafts = getattr(llm_args, "speculative_config", None)
    if drafts is not None:
        kind = str(getattr(drafts, "decoding_type", type(drafts).__name__))
        if kind.lower() not in _DRAFTS_WITHOUT_MODEL:
            raise UnsupportedModel(
                f"speculative_config: {kind} keeps KV of a draft model, which depends on the token "
                "that follows; kvconnect serves NGram"
            )
    cache = getattr(llm_args, "kv_cache_config", None)
    if str(getattr(cache, "dtype", "auto")).lower() == "nvfp4":
        raise UnsupportedModel("kv_cache_config.dtype='nvfp4': blocks with scales are not served")
    if getattr(cache, "enable_block_reuse", True) is False:
        raise ConfigurationError(
            "kv_cache_config.enable_block_reuse=False: a connector needs it; leave it on"
        )


def _check_weights(llm_args: object, *, is_named: bool) -> None:
    extension = getattr(llm_args, "ray_worker_extension_cls", None)
    load_format = _name(getattr(llm_args, "load_format", None))
    refuse(
        {
            f"ray_worker_extension_cls={extension!r}: its methods can replace the weights of a "
            "running engine, and kvconnect would not notice: blocks would keep the old name; "
            "leave it out": extension is not None,
            "load_format='dummy': the weights are not those of the model's directory, which keys "
            "are made of; kvconnect needs real ones": load_format == "dummy",
        }
    )
    if is_named:
        return
    loader = getattr(llm_args, "checkpoint_loader", None)
    checkpoint_format = _name(getattr(llm_args, "checkpoint_format", None))
    doubtful = {
        "load_format": load_format if load_format not in _LOAD_FORMATS else None,
        "checkpoint_loader": None if loader is None else type(loader).__name__,
        "checkpoint_format": checkpoint_format
        if checkpoint_format not in _CHECKPOINT_FORMATS
        else None,
    }
    refuse(
        {
            f"{field}={value}: its weights need not be those of the model's directory, which "
            "keys are made of; name them with model_revision": value is not None
            for field, value in doubtful.items()
        }
    )


def _name(value: object) -> str:
    """Returns the name of a member of an enumeration, or another value as text."""
    return str(getattr(value, "name", value)).lower()


def check_model(llm_args: object, directory: Path, *, is_named: bool) -> None:
    """Refuses models whose KV depends on more than the tokens before, or on other repositories.

    Args:
        llm_args: TensorRT-LLM's.
        directory: the directory of the model.
        is_named: ``model_revision`` stands for weights and code, wherever they come from.

    Raises:
        ConfigurationError: weights or code are in a repository that the digest does not cover.
        UnsupportedModel: RoPE of kind ``dynamic``, whose frequencies depend on the length.
    """
    config = _resolved_config(llm_args, directory)
    if not is_named:
        trusts_code = bool(getattr(llm_args, "trust_remote_code", False))
        refuse_elsewhere(config, directory, trusts_code=trusts_code)
    if "dynamic" in rope_kinds(config):
        raise UnsupportedModel(
            "rope_scaling: with RoPE of kind 'dynamic' KV depends on the length of the sequence, "
            "so blocks of equal tokens differ; it is not served"
        )


def _resolved_config(llm_args: object, directory: Path) -> dict[str, Any]:
    """Returns the directory's configuration with the replacements in `model_kwargs`."""
    given = getattr(llm_args, "model_kwargs", None)
    return config_of_directory(directory) | (dict(given) if isinstance(given, Mapping) else {})


def variant_of(llm_args: object, directory: Path) -> Mapping[str, str]:
    """Returns the settings of TensorRT-LLM that change the bytes of a block of equal tokens.

    Args:
        llm_args: TensorRT-LLM's.
        directory: the directory of the model.
    """
    cache = getattr(llm_args, "kv_cache_config", None)
    found = {
        "attn_backend": getattr(llm_args, "attn_backend", None),
        "dtype": getattr(llm_args, "dtype", None),
        "kv_dtype": getattr(cache, "dtype", None),
        "max_attention_window": getattr(cache, "max_attention_window", None),
        "sink_token_length": getattr(cache, "sink_token_length", None),
        "quant_config": getattr(llm_args, "quant_config", None),
        "sparse_attention_config": getattr(llm_args, "sparse_attention_config", None),
        # Replaces parts of the model's configuration.
        "model_kwargs": getattr(llm_args, "model_kwargs", None) or None,
        "checkpoint_format": getattr(llm_args, "checkpoint_format", None),
    }
    if original_length(_resolved_config(llm_args, directory)) is not None:
        # Beyond the original length, or without one, it turns all tokens by the long factors.
        found["max_seq_len"] = str(getattr(llm_args, "max_seq_len", None))
    return {name: _as_text(value) for name, value in found.items() if value is not None}


def _as_text(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True, default=repr)
    return str(value)
