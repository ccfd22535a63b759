"""The name of a loaded model in keys: by the files that equal it, its content, or a revision."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from kvconnect.digest.cache import ProvenContents, user_directory
from kvconnect.digest.files import ModelFiles
from kvconnect.digest.memory import content_of_tensors, module_tensors, same_bits
from kvconnect.digest.model import check_revision, digest_of
from kvconnect.engine.checkpoint.hub_cache import model_directory
from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.transformers.stored_weights import difference_from_files
from kvconnect.integrations.transformers.structure import attributes, settings_of, unnamed_code
from kvconnect.integrations.transformers.twin import initial_buffers, twin_of

__all__ = ["LoadedIdentity", "identify"]


@dataclass(frozen=True, slots=True)
class LoadedIdentity:
    """The name of a model in memory.

    Attributes:
        digest: 32 bytes that stand for the model in keys.
        own: why no other engine has this digest; empty if `digest` is that of the directory.
    """

    digest: bytes
    own: str = ""


def identify(model: PreTrainedModel, revision: str | None) -> LoadedIdentity:
    """Names `model` by its present content in memory.

    The first of these applies:

    1. `revision`, with the model's settings. Weights are not read.
    2. The digest of the model's directory, as kvconnect's own engine has it. It applies if every
       weight and buffer in memory is bit for bit what loading that directory gives. A comparison is
       remembered by the model's content.
    3. A digest of the content of all tensors, the settings, and the classes and attributes of all
       modules.

    Blocks on file I/O, and while it reads all weights.

    Args:
        model: in the caller's hands; not changed.
        revision: stands for the weights. The caller promises that no other weights, adapters and
            hooks go by this name.

    Raises:
        UnsupportedModel: without `revision`: a part of the model computes by code that no digest
            covers, such as an adapter, a hook or a patched method.
        ConfigurationError: `revision` is empty, or a file of the directory cannot be read.
        ModelChanged: the directory changed meanwhile.
    """
    check_revision(revision)
    directory = _directory(model)
    code = _unnamed(model)
    if revision is not None:
        return LoadedIdentity(_promised(model, directory, revision, named=not code))
    if code:
        raise UnsupportedModel(
            f"model: {code}, which no digest of weights names; give model_revision, a name of the "
            "weights and of what was added to them, for example 'org/name@commit+adapter@1'"
        )
    content = _content(model)
    if directory is None:
        return LoadedIdentity(content, "it was not loaded from a directory")
    if odd := _difference_from_twin(model):
        return LoadedIdentity(content, odd)
    proven = ProvenContents(user_directory())
    with ModelFiles(directory) as files:
        try:
            digest = digest_of(files)
            known = proven.has(content, digest)
            difference = "" if known else difference_from_files(model, files)
        except OSError as error:
            raise ConfigurationError(
                f"model: '{directory}' cannot be read ({error.strerror})"
            ) from error
        settings = _other_settings(model, directory)
        files.check()
    if difference:
        return LoadedIdentity(content, difference)
    proven.add(content, digest)
    if settings is None:
        return LoadedIdentity(digest)
    return LoadedIdentity(
        _with(digest, b"kvc-settings", settings), "its settings are not those of its directory"
    )


def _promised(
    model: PreTrainedModel, directory: Path | None, revision: str, *, named: bool
) -> bytes:
    """Returns the digest of the caller's name of the weights, and of the model's settings.

    Args:
        model: its weights are not read.
        directory: the directory of its configuration; ``None``: there is none.
        revision: the caller's name.
        named: all of the model's code is torch's and transformers'. Attributes and buffers that its
            settings do not explain are then a part of the digest.
    """
    if directory is None:
        settings = _as_json(settings_of(model.config))
        state = hashlib.blake2b(settings, digest_size=32, person=b"kvc-named")
        state.update(revision.encode("utf-8", "surrogatepass"))
        digest = state.digest()
    else:
        with ModelFiles(directory) as files:
            digest = digest_of(files, revision=revision)
            other = _other_settings(model, directory, cast=_cast(model))
            files.check()
        digest = digest if other is None else _with(digest, b"kvc-settings", other)
    if not named or not _difference_from_twin(model):
        return digest
    stored = model.state_dict().keys()
    tensors = [(name, one) for name, one in module_tensors(model) if name not in stored]
    return _with(digest, b"kvc-attributes", _structure(model) + content_of_tensors(tensors))


def _content(model: PreTrainedModel) -> bytes:
    """Returns a digest of everything that shapes keys and values: settings, structure, tensors."""
    state = hashlib.blake2b(digest_size=32, person=b"kvc-memory")
    state.update(_as_json(settings_of(model.config)))
    state.update(_structure(model))
    state.update(content_of_tensors(module_tensors(model)))
    return state.digest()


def _unnamed(model: PreTrainedModel) -> str:
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        return "an adapter is attached"
    return unnamed_code(model)


def _difference_from_twin(model: PreTrainedModel) -> str:
    """Returns how `model` differs from what its class makes of its configuration, or "".

    Covers parts that no file holds: classes and attributes of modules, and buffers such as
    ``inv_freq``.
    """
    try:
        twin = twin_of(model)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return f"its class does not make it from its configuration ({error})"
    own, made = attributes(model), attributes(twin)
    if own != made:
        paths = [one[0] for one, other in zip(own, made, strict=False) if one != other]
        where = paths[0] if paths and paths[0] else "the model"
        return f"{where} is not as its configuration makes it"
    now = dict(model.named_buffers())
    # It may have been made on the host, and moved.
    on_host = initial_buffers(twin, torch.device("cpu"))
    on_device = on_host if model.device.type == "cpu" else initial_buffers(twin, model.device)
    for (name, one), (_, other) in zip(on_host, on_device, strict=True):
        if not any(_same(now[name], wanted) for wanted in (one, other)):
            return f"{name} is not as its configuration makes it"
    return ""


def _same(tensor: Tensor, wanted: Tensor) -> bool:
    alike = tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return alike and same_bits(flat, wanted.cpu().reshape(-1))


def _other_settings(
    model: PreTrainedModel, directory: Path, *, cast: list[str] | None = None
) -> bytes | None:
    """Returns the settings in which `model` differs from its directory; ``None``: in none."""
    loaded = settings_of(model.config)
    stored = settings_of(AutoConfig.from_pretrained(directory, local_files_only=True))
    if loaded == stored and not cast:
        return None
    changed = {name: loaded.get(name) for name in loaded if loaded.get(name) != stored.get(name)}
    missing = sorted(stored.keys() - loaded.keys())
    return _as_json([changed, missing, *(cast or [])])


def _cast(model: PreTrainedModel) -> list[str]:
    """Returns the dtypes of a cast after loading, as by ``float()``; empty without a cast.

    A cast model differs from one loaded in that dtype: rounded weights stay rounded.
    """
    given, now = (str(one).removeprefix("torch.") for one in (model.config.dtype, model.dtype))
    return [] if given in {now, "None"} else [given, now]


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


def _structure(model: PreTrainedModel) -> bytes:
    return _as_json(attributes(model))


def _with(digest: bytes, person: bytes, more: bytes) -> bytes:
    state = hashlib.blake2b(digest, digest_size=32, person=person)
    state.update(more)
    return state.digest()


def _as_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
