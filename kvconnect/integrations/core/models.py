"""Which directory an engine's model is in, and its digest."""

from __future__ import annotations

import importlib
from pathlib import Path

from kvconnect.digest.model import check_revision, model_digest
from kvconnect.errors import ConfigurationError

__all__ = ["digest_of_model", "directory_of"]


def directory_of(model: str, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """The directory that holds `model`: itself, or its snapshot in the Hugging Face cache.

    Nothing is downloaded.

    Args:
        model: a directory, or a name on the hub.
        revision: which snapshot, of a name.
        cache_dir: where snapshots are; ``None``: where the hub's library keeps them.

    Raises:
        ConfigurationError: there is no such directory, and no snapshot on this machine.
    """
    path = Path(model)
    if path.is_dir():
        return path
    try:
        hub = importlib.import_module("huggingface_hub")
        found: str = hub.snapshot_download(
            model, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (ImportError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"model: '{model}' is neither a directory nor in the Hugging Face cache of this "
            "machine; its files are what keys are made of, so give a local directory"
        ) from error
    return Path(found)


def digest_of_model(directory: Path, *, revision: str | None = None) -> bytes:
    """32 bytes that differ between any two models; see `kvconnect.digest.model_digest`.

    The directory must not change while the engine loads it. Blocks on file I/O: hashes all weights
    the first time, about as long as reading them takes.

    Args:
        directory: of the model.
        revision: stands for the weights, which are then not read.

    Raises:
        ConfigurationError: it holds no model.
        ModelChanged: it changed meanwhile.
    """
    check_revision(revision)
    return model_digest(directory, revision=revision)
