"""What SGLang's server knows and tells no storage: which model it runs, and how it loads it.

Read from the process that the storage is in. Without a server, as where host pools are used by
themselves, there is nothing to read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.core.long_rope import config_of_directory, original_length
from kvconnect.integrations.core.models import directory_of
from kvconnect.text import shown

__all__ = ["Server"]

# Ways to load the safetensors files of the model's directory; others of it; and, by every other
# name, weights from elsewhere.
_USUAL_FILES = (
    *("auto", "safetensors", "fastsafetensors", "instanttensor"),
    *("runai_streamer", "layered"),
)
_OTHER_FILES = ("pt", "npcache", "mistral", "gguf", "bitsandbytes")
# With these, too, weights come from elsewhere.
_ELSEWHERE = (
    *("kt_weight_path", "modelopt_checkpoint_restore_path", "weight_cache_mode"),
    "checkpoint_engine_wait_weights_before_ready",
)
# What changes keys and values of equal tokens; files, of which the content does; and what of all
# that changes nothing.
_SETTINGS = (
    *("quantization", "modelopt_quant", "quantize_and_serve", "json_model_override_args"),
    *("dtype", "model_impl", "model_config_parser", "mm_process_config", "forward_hooks"),
    *("enable_precise_embedding_interpolation", "enable_w4a4_mxfp4_megamoe"),
    *("flashinfer_mxfp4_moe_precision", "deepep_dispatcher_output_dtype"),
)
_FILES = ("quantization_param_path", "rl_quant_profile", "decrypted_config_file")
_WEIGHTS = ("model_path", "load_format", "weight_version")
_NOTHING: tuple[object, ...] = (None, False, "", "{}", "auto", "off", "default", {}, [])


class Server:
    """SGLang's settings, as they are in effect in this process; without a server, none."""

    def __init__(self) -> None:
        try:
            self._context = import_module("sglang.srt.runtime_context").get_context()
            self._context.config_bag("model")
        except (ImportError, AttributeError, ValueError):  # the last: of a process without a server
            self._context = None

    def setting(self, name: str) -> Any:
        """One of SGLang's ``ServerArgs``; ``None`` if there is no such setting, or no server."""
        if self._context is None:
            return None
        try:
            return self._context.config_leaf(name)
        except (AttributeError, ValueError):
            return None

    def directory(self, name: str) -> Path:
        """Of the model that runs.

        Args:
            name: of the model, where there is no server to ask.

        Raises:
            ConfigurationError: there is none on this machine.
        """
        return directory_of(
            str(self.setting("model_path") or name),
            revision=self.setting("revision"),
            cache_dir=self.setting("download_dir"),
        )

    def refuse_unserved(self, directory: Path, *, is_named: bool) -> None:
        """Refuse what would make wrong hits.

        Args:
            directory: of the model.
            is_named: ``model_revision`` stands for the weights, wherever they come from.

        Raises:
            ConfigurationError: the weights are not those of the directory.
            UnsupportedModel: keys and values of equal tokens differ from batch to batch.
        """
        load_format = self._load_format
        if load_format == "dummy":
            raise ConfigurationError(
                "load-format=dummy: the weights are not those of the model's directory, which keys "
                "are made of; kvconnect needs real ones"
            )
        if load_format not in (*_USUAL_FILES, *_OTHER_FILES) and not is_named:
            raise ConfigurationError(
                f"load-format={shown(load_format)}: the weights need not be those of the model's "
                "directory, which keys are made of; name them with model_revision"
            )
        if not is_named:
            for name in _ELSEWHERE:
                if (value := self.setting(name)) not in _NOTHING:
                    raise ConfigurationError(
                        f"{name.replace('_', '-')}={shown(value)}: the weights need not be those "
                        "of the model's directory; name them with model_revision"
                    )
        if self.setting("enable_lora") or self.setting("lora_paths"):
            raise ConfigurationError(
                "enable-lora: SGLang names pages by an adapter's name and path, so that another "
                "adapter in its place would be given its pages; start the server without adapters, "
                "or without this storage"
            )
        config = config_of_directory(directory) | self._overrides()
        original = original_length(config)
        if original is None:
            return
        longest = self.setting("context_length") or _longest(config)
        if not 0 < longest <= original:
            raise UnsupportedModel(
                f"context-length={longest}: beyond {original} tokens SGLang turns all of a batch "
                "by the long factors of this model's longrope, so a prompt's pages would depend on "
                f"others in its batch; start SGLang with --context-length {original} or less"
            )

    def variant(self) -> dict[str, str]:
        """Settings that change keys and values, by name; those that change nothing are left off."""
        told = {name: self.setting(name) for name in _SETTINGS}
        told |= {name: _content(self.setting(name)) for name in _FILES}
        # Weights may have been replaced before this storage was attached.
        told["weight_version"] = self.setting("weight_version")
        if self._load_format in _OTHER_FILES:
            told["load_format"] = self._load_format
        return {name: _as_text(value) for name, value in told.items() if value not in _NOTHING}

    def weights(self) -> tuple[str, ...]:
        """What is another when the weights were replaced, as far as SGLang notes that."""
        return tuple(str(self.setting(name)) for name in _WEIGHTS)

    def _overrides(self) -> dict[str, Any]:
        """What the operator puts in place of parts of ``config.json``."""
        try:
            found = json.loads(self.setting("json_model_override_args") or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def _load_format(self) -> str:
        return str(self.setting("load_format") or "auto")


def _longest(config: Mapping[str, Any]) -> int:
    """The longest sequence that a configuration allows in any of its parts."""
    given = config.get("max_position_embeddings")
    lengths = [given] if isinstance(given, int) else []
    lengths += [_longest(part) for part in config.values() if isinstance(part, Mapping)]
    return max(lengths, default=0)


def _content(path: object) -> object:
    """What stands for a file's content; a name that is no file stands for itself."""
    if not isinstance(path, str) or not Path(path).is_file():
        return path
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ConfigurationError(f"'{path}' cannot be read: {error}") from error


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
