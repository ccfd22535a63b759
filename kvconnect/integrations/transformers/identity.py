"""The name of a loaded model in keys: by the files that equal it, its content, or a revision."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from kvconnect.digest.cache import ProvenContents, user_directory
from kvconnect.digest.files import ModelFiles
from kvconnect.digest.memory import (
    content_of_tensors,
    memory_place,
    module_tensors,
    pieces,
    same_bits,
)
from kvconnect.digest.model import check_revision, digest_of
from kvconnect.digest.progress import in_threads
from kvconnect.engine.checkpoint.hub_cache import model_directory
from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.transformers.structure import attributes, settings_of, unnamed_code
from kvconnect.integrations.transformers.twin import initial_buffers, twin_of

_SUFFIX = ".safetensors"
_PICKLED = "pytorch_model*.bin"
_PIECE = 1 << 20  # is compared while it is in the processor's cache
_Pair: TypeAlias = tuple[str, Tensor, Tensor]
"""The name of a weight, the weight in memory, and the one in a file, which PyTorch has mapped."""


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


def difference_from_files(model: PreTrainedModel, files: ModelFiles) -> str:
    """Returns how the weights in memory differ from those that `files` hold; empty: they do not.

    A weight equals its file if loading gives these bits: renamed, merged or split as transformers
    does it for this architecture, and cast to the dtype it has in memory. A weight that no file
    names must be one that another name shares. Weights that the model does not use are ignored.

    Blocks on file I/O, and logs every 5 seconds how far it is.

    Raises:
        OSError: a file cannot be read.
    """
    stored = _stored_tensors(files)
    if stored is None:
        return "no files of the directory that can be compared hold its weights"
    pairs, missing = _paired(model, stored)
    if missing:
        return f"{missing} is in no file"
    for name, tensor, file in pairs:
        if tensor.shape != file.shape:
            return f"{name} has shape {list(tensor.shape)}, in the file {list(file.shape)}"
    compared = in_threads(_equal, pairs, lambda pair: pair[1].nbytes, "weights in memory")
    with closing(compared):
        differing = (pair[0] for pair, equal in zip(pairs, compared, strict=True) if not equal)
        first = next(differing, None)
    return "" if first is None else f"{first} differs from the file"


def _paired(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> tuple[list[_Pair], str]:
    """Finds the file of each tensor; also returns the name of a tensor that has none."""
    state: dict[str, Tensor] = model.state_dict()
    reverted: Mapping[str, Tensor] = revert_weight_conversion(model, state)
    pairs, alone = [], []
    found = set()
    for name, tensor in reverted.items():
        file = next((stored[one] for one in _spellings(model, name) if one in stored), None)
        if file is None:
            alone.append((name, tensor))
        else:
            pairs.append((name, tensor, file))
            found.add(memory_place(tensor))
    missing = next((name for name, tensor in alone if memory_place(tensor) not in found), "")
    return pairs, missing


def _spellings(model: PreTrainedModel, name: str) -> Iterator[str]:
    """Yields the names under which files may hold a weight, with and without a prefix."""
    prefix = f"{model.base_model_prefix}."
    yield name
    yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name


def _equal(pair: _Pair) -> bool:
    _, tensor, file = pair
    flat, done = file.reshape(-1), 0
    for piece in pieces(tensor, _PIECE):
        loaded = flat[done : done + piece.numel()]
        if piece.numel() and not same_bits(loaded.to(piece.device, piece.dtype), piece):
            return False
        done += piece.numel()
    return True


def _stored_tensors(files: ModelFiles) -> dict[str, Tensor] | None:
    """Returns all tensors of the files that transformers loads, by name; they are mapped.

    ``None`` if a file has another format, or two files have a tensor of one name.
    """
    names = list(files.weights)
    if not any(name.endswith(_SUFFIX) for name in names):
        names = [name for name in names if fnmatchcase(name, _PICKLED)]  # a trainer writes others
    found: dict[str, Tensor] = {}
    for name in names:
        read = _safetensors if name.endswith(_SUFFIX) else _pickled
        tensors = read(f"/proc/self/fd/{files.files[name].descriptor}")
        if tensors is None or found.keys() & tensors.keys():
            return None
        found |= tensors
    return found or None


def _safetensors(path: str) -> dict[str, Tensor] | None:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError:
        return None


def _pickled(path: str) -> dict[str, Tensor] | None:
    """Returns the tensors of a file that ``torch.save`` wrote, as transformers reads it.

    The file is of the model's directory, which the caller has loaded; it never comes from a store
    or a peer. ``weights_only`` still prevents it from running code.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError):  # another format, or PyTorch before 1.6
        return None
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        return None
    return found
