"""Finds models by name, ``org/name``, in the local Hugging Face cache; never on the network."""

from __future__ import annotations

import re
from pathlib import Path

from kvconnect.errors import ConfigurationError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_PREFIX = "models--"
_SHOWN = 10


def model_directory(model: str | Path) -> Path:
    """Returns `model` if it is a directory, else the snapshot of that name in the local cache.

    A directory has precedence over a name. The cache is that of huggingface_hub (``HF_HUB_CACHE``,
    ``HF_HOME``); of several snapshots, the one of the branch ``main`` is taken.

    Raises:
        ConfigurationError: neither exists; the message lists the cache's models, and how to
            download one.
    """
    directory = Path(model)
    if isinstance(model, Path) or directory.is_dir() or not _is_name(model):
        return directory
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = Path(constants.HF_HUB_CACHE)
    try:
        found = Path(snapshot_download(model, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigurationError(_missing(model, cache)) from error
    except OSError as error:
        raise ConfigurationError(
            f"model: '{model}' is not a directory, and the Hugging Face cache {cache} cannot be "
            f"read: {error.strerror}"
        ) from error
    if not (found / "config.json").is_file():
        raise ConfigurationError(
            f"model: '{model}' is only partly in the Hugging Face cache: {found} has no "
            f"config.json; `hf download {model}` gets the rest"
        )
    return found


def _is_name(model: str) -> bool:
    return _NAME.fullmatch(model) is not None and model not in {".", ".."}


def _missing(model: str, cache: Path) -> str:
    names = sorted(
        path.name.removeprefix(_PREFIX).replace("--", "/") for path in cache.glob(f"{_PREFIX}*")
    )
    if model in names:
        found = sorted((cache / (_PREFIX + model.replace("/", "--")) / "snapshots").glob("*"))
        have = f"has no branch 'main' of it; give a directory: {', '.join(map(str, found)) or '-'}"
    elif names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        have = f"has {', '.join(names[:_SHOWN])}{more}"
    else:
        have = "has no models"
    return (
        f"model: '{model}' is not a directory, and not in the Hugging Face cache: {cache} {have}. "
        f"Nothing is downloaded here: `hf download {model}` does, or give a model directory "
        "(`kvconnect make-model DIR` writes a small random one)"
    )
