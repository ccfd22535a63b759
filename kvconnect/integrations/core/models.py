"""Which directory an engine's model is in, and its digest."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvconnect.digest.files import ModelFiles
from kvconnect.digest.identity import FileIdentity
from kvconnect.digest.model import digest_of, model_digest
from kvconnect.errors import ConfigurationError, ModelChanged

__all__ = ["digest_of_model", "directory_of"]

# Longer than a tick of the clocks that start times and ctimes are taken of, 10 ms at most.
_TICK_S = 0.05


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

    Engines have loaded the weights by then. In a process that the engine started for itself, as
    most do, nothing may have changed since: what was loaded could be either. In the caller's own
    process that cannot be told, and the directory must not change while the engine loads it.
    Blocks on file I/O: hashes all weights the first time, about as long as reading them takes.

    Args:
        directory: of the model.
        revision: stands for the weights, which are then not read. The caller's promise.

    Raises:
        ConfigurationError: it holds no model.
        ModelChanged: it changed meanwhile, or since this process started.
    """
    if revision is not None or multiprocessing.parent_process() is None:
        return model_digest(directory, revision=revision)
    with ModelFiles(directory) as files:
        digest = digest_of(files)
        _refuse_changed(files, _started_ns())
        files.check()
    return digest


def _refuse_changed(files: ModelFiles, since_ns: int) -> None:
    directory = files.directory
    if directory.parent.name == "snapshots":
        return  # of the hub: named by its content, and perhaps downloaded by the engine itself
    states = [
        (directory / name, files.files[name].identity) for name in ("config.json", *files.weights)
    ]
    try:
        states += [(path, FileIdentity.of(state)) for path, state in _places(directory)]
    except OSError as error:
        raise ModelChanged(f"model: '{directory}' changed while it was read") from error
    for path, identity in states:
        if identity.changed_ns > since_ns:
            raise ModelChanged(
                f"model: '{path}' changed after this process had started, so the engine may have "
                "loaded what was there before: start it again, or name the weights with "
                "model_revision"
            )


def _places(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """`directory` itself, and every link on the way to it: what decides which one it is."""
    at, todo = Path(directory.anchor or Path.cwd()), list(reversed(directory.parts))
    while todo:
        path = at / todo.pop()
        state = path.lstat()
        if stat.S_ISLNK(state.st_mode):
            yield path, state
            todo += reversed(path.readlink().parts)
        else:
            at = path
    yield at, at.stat()


def _started_ns() -> int:
    """When this process started, in nanoseconds since the epoch; at most a tick too late."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    ticks = int(fields[19])  # starttime, see proc(5)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return int((time.time() - age + _TICK_S) * 1e9)
