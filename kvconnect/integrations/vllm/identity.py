"""What of vLLM's configuration shapes KV besides model and layout, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvconnect.errors import ConfigurationError

__all__ = ["refuse_unserved", "variant_of"]

_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "[ngram]")


def refuse_unserved(vllm_config: Any) -> None:
    """Refuse what would make wrong hits, or none at all.

    Raises:
        ConfigurationError: names the setting of vLLM.
    """
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            raise ConfigurationError(
                f"{name}={getattr(parallel, name)}: KvConnect serves 1; use tensor_parallel_size"
            )
    draft = vllm_config.speculative_config
    if draft is not None and draft.method not in _WITHOUT_KV:
        raise ConfigurationError(
            f"speculative_config.method='{draft.method}': KV of its draft model cannot be cached "
            "(it depends on tokens that follow); KvConnect serves 'ngram' and 'suffix'"
        )
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if load_format == "dummy":
        raise ConfigurationError(
            "load_format='dummy': the weights are not those of the model's directory, which keys "
            "are made of; KvConnect needs real ones"
        )
    if callable(getattr(vllm_config.model_config, "hf_overrides", None)):
        raise ConfigurationError(
            "hf_overrides: a function cannot be told apart from another; give a dictionary"
        )
    _refuse_latents_on_cpu(vllm_config)


def variant_of(vllm_config: Any, *, packing: str | None = None) -> dict[str, str]:
    """Settings that change KV, by name; those that change nothing are left off.

    Args:
        vllm_config: vLLM's.
        packing: of the CPU's kernels, if it is their own.
    """
    model = vllm_config.model_config
    found: dict[str, str] = {}
    if quantization := getattr(model, "quantization", None):
        found["quantization"] = str(quantization)
    if getattr(model, "disable_sliding_window", False):
        found["disable_sliding_window"] = "1"
    if overrides := getattr(model, "hf_overrides", None):
        found["hf_overrides"] = _digest(overrides)
    if packing is not None:
        found["packing"] = packing
    return found


def _refuse_latents_on_cpu(vllm_config: Any) -> None:
    """Where vLLM switches its own prefix cache off, as on CPUs without AMX.

    Its kernels there answer the same prompt in another way in another batch (0.32).
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


def _digest(settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
