"""The settings of the storage and of SGLang's server, and the reasons to refuse some."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.core.configuration import (
    config_of_directory,
    original_length,
    refuse,
    refuse_elsewhere,
)
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.integrations.sglang.server import NOTHING, OTHER_FILES, Server
from kvconnect.keys import Shard
from kvconnect.text import shown

ENGINE = "sglang"
WHERE = "hicache-storage-backend-extra-config"

# Fields that SGLang itself reads.
_ITS_OWN = (
    *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"),
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
    *("prefetch_timeout_max", "hicache_storage_pass_prefix_keys", "head_group", "layer_partition"),
)
# SGLang saves on its own threads, which may wait.
_PATIENT = {"on_backlog": "wait"}
# SGLang decides which pages are saved, and the least number to load. There are no producers.
_WITHOUT = ("save_on", "min_load_tokens", "producer_timeout_s")


def storage_settings(storage_config: Any) -> EngineSettings:
    """Returns the settings in a ``HiCacheStorageConfig``.

    Raises:
        ConfigurationError: ``url`` or ``interface_v1`` is missing, or a field is wrong; names it.
    """
    given = getattr(storage_config, "extra_config", None) or {}
    if not isinstance(given, dict):
        raise ConfigurationError(f"{WHERE}: {shown(given)} must be an object of settings")
    if not given.get("interface_v1"):
        raise ConfigurationError(
            f"{WHERE}.interface_v1: {shown(given.get('interface_v1'))} must be 1: pages are moved "
            "by SGLang's batch_get_v1 and batch_set_v1"
        )
    settings = EngineSettings.of(
        ENGINE, _PATIENT | given, where=WHERE, passed_over=_ITS_OWN, without=_WITHOUT
    )
    if settings.is_shared:
        raise ConfigurationError(
            f"{WHERE}.namespace: 'shared' is not possible: SGLang gives its storage hashes instead "
            "of tokens, and no other engine makes keys of these; leave it out"
        )
    return settings


def rank_of(storage_config: Any) -> Shard:
    """Returns this rank's share of the heads; pipeline stages differ by their layers.

    Raises:
        UnsupportedModel: tokens of one page are spread over ranks.
    """
    for name in ("attn_cp_size", "dcp_size"):
        if (size := getattr(storage_config, name, 1) or 1) > 1:
            raise UnsupportedModel(f"{name}={size}: context parallelism is not served")
    return Shard(tp_rank=storage_config.tp_rank, tp_size=storage_config.tp_size)


# Ways to load the safetensors files of the model's directory. With every way that is neither here
# nor among the other files, weights come from elsewhere.
_USUAL_FILES = (
    *("auto", "safetensors", "fastsafetensors", "instanttensor"),
    *("runai_streamer", "layered"),
)
# With these, too, weights come from elsewhere.
_ELSEWHERE = (
    *("kt_weight_path", "modelopt_checkpoint_restore_path", "weight_cache_mode"),
    "checkpoint_engine_wait_weights_before_ready",
)
_NAME_THEM = "name them with model_revision"


def refuse_unserved(server: Server, directory: Path, *, is_named: bool) -> None:
    """Refuses models and settings that would cause wrong hits.

    Args:
        server: whose settings count.
        directory: the directory of the model.
        is_named: ``model_revision`` stands for the weights, wherever they come from.

    Raises:
        ConfigurationError: the weights are not those of the directory, or inputs of requests have
            names that do not stand for their content.
        UnsupportedModel: keys and values of equal tokens differ.
    """
    _refuse_other_weights(server, is_named=is_named)
    if not is_named:
        resolved = {} if server.model_config is None else _resolved(server.model_config)
        refuse_elsewhere(resolved, directory, trusts_code=server.is_set("trust_remote_code"))
    _refuse_inputs_without_names(server)
    config = config_of_directory(directory)
    if server.model_config is not None:
        config |= _resolved(server.model_config)
    config |= _overrides(server)
    _refuse_attention_ahead(server, config)
    original = original_length(config)
    if original is None:
        return
    longest = server.setting("context_length") or _longest(config)
    if not 0 < longest <= original:
        raise UnsupportedModel(
            f"context-length={longest}: beyond {original} tokens SGLang turns all of a batch "
            "by the long factors of this model's longrope, so a prompt's pages would depend on "
            f"others in its batch; start SGLang with --context-length {original} or less"
        )


def refuse_unserved_states(server: Server, *, num_stages: int) -> None:
    """Refuses settings with which recurrent states would be read wrongly.

    Args:
        server: whose settings count.
        num_stages: the stages of the pipeline.

    Raises:
        UnsupportedModel: states are quantised, or the layers of states are not known.
    """
    if num_stages > 1:
        raise UnsupportedModel(
            f"pp-size={num_stages}: SGLang does not say of which layers a stage's recurrent states "
            "are; use one stage for models with recurrent layers"
        )
    if server.is_set("enable_int8_mamba_checkpoint"):
        raise UnsupportedModel(
            "enable-int8-mamba-checkpoint: the scales of recurrent states do not lie with them; "
            "leave it out"
        )


def _refuse_other_weights(server: Server, *, is_named: bool) -> None:
    load_format = server.load_format
    if load_format == "dummy":
        raise ConfigurationError(
            "load-format=dummy: the weights are not those of the model's directory, which keys "
            "are made of; kvconnect needs real ones"
        )
    if is_named:
        return
    if load_format not in (*_USUAL_FILES, *OTHER_FILES):
        raise ConfigurationError(
            f"load-format={shown(load_format)}: the weights need not be those of the model's "
            f"directory, which keys are made of; {_NAME_THEM}"
        )
    for name in _ELSEWHERE:
        if (value := server.setting(name)) not in NOTHING:
            raise ConfigurationError(
                f"{name.replace('_', '-')}={shown(value)}: the weights need not be those "
                f"of the model's directory; {_NAME_THEM}"
            )
    loaded, given = getattr(server.model_config, "model_path", None), server.setting("model_path")
    if loaded is not None and given is not None and str(loaded) != str(given):
        raise ConfigurationError(
            f"model-path={shown(given)}: SGLang loads the weights of {shown(loaded)} for it; "
            f"{_NAME_THEM}"
        )
    model = getattr(server.runner, "model", None)
    sources = (str(one.model_or_path) for one in getattr(model, "secondary_weights", ()))
    extra = str(server.setting("model_loader_extra_config"))
    if any(one != str(given) for one in sources) or "qlora_adapter_name_or_path" in extra:
        raise ConfigurationError(
            "the model's class, or model-loader-extra-config, has SGLang load weights of another "
            f"directory, too; {_NAME_THEM}"
        )
    module = type(model).__module__
    if server.runner is not None and module.partition(".")[0] not in ("sglang", "builtins"):
        raise ConfigurationError(
            f"the model's class is of the package {shown(module)}: its code is not in the keys; "
            "name weights and code with model_revision"
        )


def _refuse_inputs_without_names(server: Server) -> None:
    refuse(
        {
            "enable-lora: SGLang names pages by an adapter's name and path, so that another "
            "adapter in its place would be given its pages; start the server without adapters, "
            "or without this storage": server.is_set("enable_lora") or server.is_set("lora_paths"),
            "enable-multimodal: SGLang names pictures, sound and video by hashes that a client may "
            "give (mm_hashes) and that leave out shapes, so that other pictures would be given "
            "their pages; start the server with --language-model-only, or without this storage": (
                getattr(server.model_config, "is_multimodal", False)
            ),
            "disaggregation-decode-enable-offload-kvcache: a decode server of SGLang's also saves "
            "requests that were given embeddings, under the names of placeholder tokens; leave "
            "saving to the prefill servers": (
                server.is_set("disaggregation_decode_enable_offload_kvcache")
            ),
        }
    )


def _refuse_attention_ahead(server: Server, config: Mapping[str, Any]) -> None:
    if server.is_set("dllm_algorithm"):
        raise UnsupportedModel(
            "dllm-algorithm: attention of diffusion models also looks ahead, so keys and values of "
            "a page depend on later tokens"
        )
    looks_ahead = any(
        part.get("use_bidirectional_attention") in (True, "all") or part.get("is_causal") is False
        for part in _parts(config)
    )
    if looks_ahead or any(kind != "decoder" for kind in _kinds_of_attention(server.runner)):
        raise UnsupportedModel(
            "this model's attention also looks ahead, so keys and values of a page depend on "
            "later tokens"
        )


def _kinds_of_attention(runner: Any) -> set[str]:
    """Returns the kinds of the layers that read the cache: "decoder", "encoder_only" and others."""
    model = getattr(runner, "model", None)
    if not isinstance(model, torch.nn.Module):
        return set()
    found = (getattr(one, "attn_type", None) for one in model.modules())
    return {str(getattr(kind, "value", kind)) for kind in found if kind is not None}


def _resolved(model_config: Any) -> dict[str, Any]:
    """Returns the configuration that SGLang resolved, with its separate setting for text."""
    hf_config = getattr(model_config, "hf_config", None)
    text = getattr(model_config, "hf_text_config", None)
    found: dict[str, Any] = {} if hf_config is None else dict(hf_config.to_dict())
    if getattr(text, "is_causal", None) is False:
        found["is_causal"] = False
    return found


def _overrides(server: Server) -> dict[str, Any]:
    """Returns the operator's replacements of parts of ``config.json``."""
    try:
        found = json.loads(server.setting("json_model_override_args") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the configuration and its text part. Encoders of pictures may look ahead."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, Mapping) else [config]


def _longest(config: Mapping[str, Any]) -> int:
    """Returns the longest sequence that a configuration allows in any of its parts."""
    given = config.get("max_position_embeddings")
    lengths = [given] if isinstance(given, int) else []
    lengths += [_longest(part) for part in config.values() if isinstance(part, Mapping)]
    return max(lengths, default=0)
