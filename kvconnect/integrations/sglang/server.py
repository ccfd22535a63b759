"""The SGLang server that this process is a part of: its settings and its model.

They are read from the process that the storage is in. Without a server, where host pools are used
by themselves, every setting is ``None``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.configuration import config_of_directory
from kvconnect.integrations.core.models import directory_of

OTHER_FILES = ("pt", "npcache", "mistral", "gguf", "bitsandbytes")
"""Ways to load other files of the model's directory than its ``*.safetensors``."""
NOTHING: tuple[object, ...] = (None, False, -1, "", "{}", "auto", "off", "default", {}, [])
"""Values of a setting that change nothing."""

# Settings that change keys and values of equal tokens.
_SETTINGS = (
    *("quantization", "modelopt_quant", "quantize_and_serve", "json_model_override_args"),
    *("dtype", "model_impl", "model_config_parser", "mm_process_config", "forward_hooks"),
    *("enable_precise_embedding_interpolation", "enable_w4a4_mxfp4_megamoe"),
    *("flashinfer_mxfp4_moe_precision", "deepep_dispatcher_output_dtype"),
    *("enable_tf32_matmul", "enable_quant_communications", "prefill_kv_cache_dequant_dtype"),
    *("qsa_indexer_dtype", "enable_hisparse", "hisparse_config", "rl_on_policy_target"),
)
# Settings that do so beside weights for the processor.
_KT_SETTINGS = ("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token")
# Settings that name files, whose content changes keys and values.
_FILES = ("quantization_param_path", "rl_quant_profile", "decrypted_config_file")
# Settings that change recurrent states, or the order of their elements.
_STATE_SETTINGS = (
    *("mamba_backend", "mamba_ssm_dtype", "enable_mamba_cache_stochastic_rounding"),
    *("mamba_cache_philox_rounds", "linear_attn_backend", "linear_attn_decode_backend"),
    *("linear_attn_prefill_backend", "linear_attn_verify_backend", "enable_linear_replayssm"),
    *("linear_replayssm_cache_len", "enable_linear_replayssm_spec"),
)
_WEIGHTS = ("model_path", "load_format", "weight_version")


class Server:
    """The server's settings in effect in this process, and its scheduler.

    Must be made in the call by which the scheduler makes the storage.

    Attributes:
        scheduler: SGLang's ``Scheduler``, whose call this is; ``None`` if there is none.
        is_starting: the scheduler is being made, so no request has run yet.
    """

    def __init__(self) -> None:
        try:
            self._context = import_module("sglang.srt.runtime_context").get_context()
            self._context.config_bag("model")
        except (ImportError, AttributeError, ValueError):  # the last: of a process without a server
            self._context = None
        self.scheduler, self.is_starting = _calling_scheduler()

    @property
    def is_there(self) -> bool:
        """Returns whether this process belongs to a server."""
        return self._context is not None

    @property
    def runner(self) -> Any:
        """The ``ModelRunner`` of the target model; ``None`` if it cannot be reached."""
        worker = getattr(self.scheduler, "tp_worker", None)
        return getattr(worker, "model_runner", None)

    @property
    def model_config(self) -> Any:
        """The ``ModelConfig`` that the model was made with; ``None`` if it cannot be reached."""
        found = getattr(self.runner, "model_config", None)
        return found or getattr(self.scheduler, "model_config", None)

    def setting(self, name: str) -> Any:
        """Returns one of SGLang's ``ServerArgs``; ``None`` without a server or such a setting."""
        if self._context is None:
            return None
        try:
            return self._context.config_leaf(name)
        except (AttributeError, ValueError):
            return None

    def is_set(self, name: str) -> bool:
        """Returns True if the setting has a value that may change something."""
        return self.setting(name) not in NOTHING

    @property
    def load_format(self) -> str:
        """The way in which the weights are loaded."""
        return str(self.setting("load_format") or "auto")

    def directory(self, name: str) -> Path:
        """Returns the directory of the model that runs.

        Args:
            name: the name of the model; used where there is no server.

        Raises:
            ConfigurationError: there is no such directory on this machine.
        """
        return directory_of(
            str(self.setting("model_path") or name),
            revision=self.setting("revision"),
            cache_dir=self.setting("download_dir"),
        )

    def variant(self, directory: Path, kv_dtype: str) -> dict[str, str]:
        """Returns the settings that change keys and values beside the model's files, by name.

        Settings that change nothing are left out, so that stores of other servers are found.

        Args:
            directory: the directory of the model.
            kv_dtype: the dtype of the host pool's elements.
        """
        names = _SETTINGS + (_KT_SETTINGS if self.is_set("kt_weight_path") else ())
        given = {name: self.setting(name) for name in names}
        given |= {name: _content(self.setting(name)) for name in _FILES}
        # Weights may have been replaced before this storage was attached.
        given["weight_version"] = self.setting("weight_version")
        if self.load_format in OTHER_FILES:
            given["load_format"] = self.load_format
        if (config := self.model_config) is not None:
            given["configuration"] = changed_configuration(config, directory)
            if not self.is_set("dtype"):
                given["compute_dtype"] = _pool_independent(config, kv_dtype)
        return {name: _as_text(value) for name, value in given.items() if value not in NOTHING}

    def kv_dtype(self, dtype: torch.dtype) -> str:
        """Returns the dtype of a host pool's elements: SGLang holds several 8-bit ones as bytes.

        Raises:
            ConfigurationError: they are bytes, and SGLang does not say of what.
        """
        if dtype.is_floating_point:
            return str(dtype).removeprefix("torch.")
        given = self.setting("kv_cache_dtype")
        if given in (None, "auto"):
            raise ConfigurationError(
                f"kv-cache-dtype: the host pool holds {dtype}, and SGLang does not say what that "
                "stands for; use auto or bfloat16"
            )
        return str(given)

    def state_kernels(self) -> str:
        """Returns what the values of recurrent states, and the order of their elements, depend on.

        Kernels of one shape have orders of their own, which SGLang does not describe.
        """
        try:
            release = version("sglang")
        except PackageNotFoundError:
            release = "unknown"
        device = torch.cuda.get_device_capability() if torch.cuda.is_available() else ()
        build = [release, str(torch.version.cuda), str(torch.version.hip), *device]
        return _as_text([*build, [self.setting(name) for name in _STATE_SETTINGS]])

    def weights(self) -> tuple[str, ...]:
        """Returns the settings that SGLang changes when it replaces the weights."""
        return tuple(str(self.setting(name)) for name in _WEIGHTS)


def _calling_scheduler() -> tuple[Any, bool]:
    """Returns SGLang's scheduler among the callers, and whether it is being constructed."""
    module = sys.modules.get("sglang.srt.managers.scheduler")
    cls = getattr(module, "Scheduler", None)
    found, is_starting = None, False
    frame = inspect.currentframe()
    while frame is not None and cls is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, cls):
            found = owner
            is_starting = is_starting or frame.f_code.co_name == "__init__"
        frame = frame.f_back
    return found, is_starting


def _content(path: object) -> object:
    """Returns a digest of the file at `path`; any other value is returned as it is."""
    if not isinstance(path, str) or not Path(path).is_file():
        return path
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ConfigurationError(f"'{path}' cannot be read: {error}") from error


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


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


def _pool_independent(model_config: Any, kv_dtype: str) -> str | None:
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
