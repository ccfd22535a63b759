"""What stands for a loaded model in keys: the directory that it came from, or a name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from kvconnect.digest.model import check_revision, model_digest
from kvconnect.engine.checkpoint.hub_cache import model_directory
from kvconnect.errors import ConfigurationError, UnsupportedModel

__all__ = ["WeightVersions", "digest_of_loaded"]

# What from_pretrained sets, or what changes no key and no value.
_HARMLESS = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "name_or_path", "model_type", "id2label"),
    *("label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}


def digest_of_loaded(model: PreTrainedModel, revision: str | None) -> bytes:
    """32 bytes that stand for `model`: those of its directory, as kvconnect's own engine has them.

    Settings that were given when it was loaded and differ from the directory's make another digest,
    and so does another dtype than it was loaded in.
    Blocks on file I/O.

    Args:
        model: loaded with ``from_pretrained``, and not changed since.
        revision: names the weights instead; they are then not read, and no directory is needed. The
            caller promises that no other weights go by this name.

    Raises:
        ConfigurationError: it came from no directory, or the directory is gone.
        UnsupportedModel: an adapter is attached to it, and no `revision` names both.
        ModelChanged: the directory changed meanwhile.
    """
    check_revision(revision)
    if revision is None and _has_adapter(model):
        raise UnsupportedModel(
            "model: an adapter is attached, which its directory says nothing of; give "
            "model_revision, a name of weights and adapter, for example 'org/name@commit+adapter@1'"
        )
    directory = _directory(model)
    if directory is None:
        if revision is None:
            raise ConfigurationError(
                f"model: '{model.name_or_path}' is no directory, nor in the Hugging Face cache, so "
                "nothing tells it from other models; load it with from_pretrained, or give "
                "model_revision, a name that no other weights have"
            )
        return _named(revision, _settings(model.config))
    digest = model_digest(directory, revision=revision)
    loaded = _settings(model.config)
    stored = _settings(AutoConfig.from_pretrained(directory, local_files_only=True))
    cast = _cast(model)
    if loaded == stored and not cast:
        return digest
    changed = {name: loaded.get(name) for name in loaded if loaded.get(name) != stored.get(name)}
    missing = sorted(stored.keys() - loaded.keys())
    state = hashlib.blake2b(digest, digest_size=32, person=b"kvc-settings")
    state.update(_as_json([changed, missing, *cast]))
    return state.digest()


class WeightVersions:
    """Tells whether weights were changed in place, or replaced, since this was made.

    PyTorch counts the changes of each tensor; what goes past that count (``weight.data``) is not
    seen.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._versions = self._now()

    def changed(self) -> bool:
        """Whether they were."""
        return self._now() != self._versions

    def _now(self) -> list[tuple[int, int]]:
        return [
            (id(one), 0 if one.is_inference() else one._version)  # noqa: SLF001  documented
            for one in self._model.parameters()
        ]


def _cast(model: PreTrainedModel) -> list[str]:
    """From and to which dtype the weights were cast after they were loaded, as by ``float()``.

    They are not what loading them in that dtype gives: what was rounded stays so.
    """
    given, now = (str(one).removeprefix("torch.") for one in (model.config.dtype, model.dtype))
    return [] if given in {now, "None"} else [given, now]


def _has_adapter(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"))


def _directory(model: PreTrainedModel) -> Path | None:
    name = model.name_or_path
    if not name:
        return None
    try:
        directory = model_directory(name)
    except ConfigurationError:
        return None
    commit = getattr(model.config, "_commit_hash", None)
    if commit and directory.parent.name == "snapshots" and directory.name != commit:
        directory = directory.parent / commit  # another branch than 'main' was loaded
    return directory if (directory / "config.json").is_file() else None


def _settings(config: Any) -> dict[str, Any]:
    """All that shapes keys and values, and some that does not."""
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: _without_harmless(value) for name, value in settings.items() if _counts(name)}


def _without_harmless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_harmless(each) for name, each in value.items() if _counts(name)}
    return [_without_harmless(each) for each in value] if isinstance(value, list) else value


def _counts(name: str) -> bool:
    return name not in _HARMLESS and not name.startswith("_")


def _named(revision: str, settings: dict[str, Any]) -> bytes:
    state = hashlib.blake2b(_as_json(settings), digest_size=32, person=b"kvc-named")
    state.update(revision.encode("utf-8", "surrogatepass"))
    return state.digest()


def _as_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
