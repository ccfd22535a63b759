"""Settings of the connector inside TensorRT-LLM: from the environment, checked against its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.core.long_rope import config_of_directory, original_length
from kvconnect.integrations.core.settings import EngineSettings

__all__ = ["ENGINE", "VARIABLE", "check_engine", "engine_settings", "variant_of"]

ENGINE = "trtllm"
VARIABLE = "KVCONNECT_CONFIG"

# TensorRT-LLM is stopped meanwhile: longer than that a prompt is better computed.
_LOAD_TIMEOUT_S = 2.0


def engine_settings(llm_args: object) -> EngineSettings:
    """The settings of ``llm_args.kv_connector_config.kvconnect``, else of the environment.

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
    settings = EngineSettings.of(ENGINE, {"load_timeout_s": _LOAD_TIMEOUT_S, **given}, where=where)
    if settings.is_shared:
        raise ConfigurationError(
            f"{where}.namespace: the order of bytes in TensorRT-LLM's blocks depends on its "
            "attention kernels, so they are not shared with other engines; leave it out"
        )
    return settings


def check_engine(llm_args: object) -> None:
    """Refuse what a connector of TensorRT-LLM cannot do right.

    Raises:
        ConfigurationError: several ranks: a load that fails on one of them cannot be told to the
            others.
        UnsupportedModel: blocks have scales beside them.
    """
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        size = getattr(llm_args, name, 1) or 1
        if size > 1:
            raise ConfigurationError(
                f"{name}={size}: TensorRT-LLM has no way to compute a prompt whose load failed on "
                "one of several ranks; kvconnect serves it on one rank"
            )
    cache = getattr(llm_args, "kv_cache_config", None)
    if str(getattr(cache, "dtype", "auto")).lower() == "nvfp4":
        raise UnsupportedModel("kv_cache_config.dtype='nvfp4': blocks with scales are not served")
    if getattr(cache, "enable_block_reuse", True) is False:
        raise ConfigurationError(
            "kv_cache_config.enable_block_reuse=False: a connector needs it; leave it on"
        )


def variant_of(llm_args: object, directory: Path) -> Mapping[str, str]:
    """What of TensorRT-LLM's own settings changes the bytes of a block of equal tokens.

    Args:
        llm_args: TensorRT-LLM's.
        directory: of the model.
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
    }
    if original_length(config_of_directory(directory)) is not None:
        # Beyond the original length, or without one, it turns all tokens by the long factors.
        found["max_seq_len"] = str(getattr(llm_args, "max_seq_len", None))
    return {name: str(value) for name, value in found.items() if value is not None}
