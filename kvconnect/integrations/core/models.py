"""The directory of an engine's model, and the model's digest."""

from __future__ import annotations

import errno
import importlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvconnect.digest.files import ModelFiles
from kvconnect.digest.identity import FileIdentity
from kvconnect.digest.model import digest_of, model_digest
from kvconnect.errors import ConfigurationError, ModelChanged

# Longer than a tick of the clocks that start times and ctimes are taken of, 10 ms at most.
_TICK_S = 0.05
_MAX_LINKS = 40  # on the way to a file, as Linux has it


def directory_of(model: str, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Returns the directory of `model`: itself, or its snapshot in the Hugging Face cache.

    Downloads nothing.

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


def digest_of_model(
    directory: Path, *, revision: str | None = None, since_ns: int | None = None
) -> bytes:
    """Returns 32 bytes that differ between any two models; see `kvconnect.digest.model_digest`.

    The engine has loaded the weights by then. If a file changed since the loading began, the engine
    may have loaded the old or the new one, so the model is refused.

    Blocks on file I/O: hashes all weights the first time, about as long as reading them takes.

    Args:
        directory: the directory of the model.
        revision: stands for the weights, which are then not read. The caller's promise.
        since_ns: when the engine may have begun to load, in nanoseconds since the epoch; ``None``:
            when this process started.

    Raises:
        ConfigurationError: the directory holds no model.
        ModelChanged: it changed meanwhile, or since `since_ns`.
    """
    if revision is not None:
        return model_digest(directory, revision=revision)
    with ModelFiles(directory) as files:
        digest = digest_of(files)
        refuse_changed(files, process_started_ns() if since_ns is None else since_ns)
        files.check()
    return digest


def refuse_changed(files: ModelFiles, since_ns: int) -> None:
    """Refuses a model of which a file, folder or link changed at `since_ns` or later.

    Checks every file that the digest covers, the folders of these files, every link on the way to
    them, and renames of folders above them. A file in the Hugging Face cache is named by its
    content, and the engine itself may have downloaded it. So such a file does not count. Links and
    references that were switched to this snapshot count as well.

    Args:
        files: the files of the model, open.
        since_ns: nanoseconds since the epoch.

    Raises:
        ModelChanged: names the path that changed.
    """
    directory = files.directory.absolute()
    names = ("config.json", *files.weights, *files.beside)
    if directory.parent.name == "snapshots":
        files_in = [directory / name for name in names]
        paths = [path for path in files_in if not _is_blob(path)]
        _refuse_switched(directory, files_in, since_ns)
    else:
        folders = (directory / folder for folder in (*files.folders, *files.aliases))
        paths = [directory, *folders, *(directory / name for name in names)]
    seen: set[Path] = set()
    try:
        changed = next((at for path in paths for at in _changed(path, since_ns, seen)), None)
    except OSError as error:
        raise ModelChanged(
            f"model: '{directory}' changed while it was read; try again when no process "
            "writes to it"
        ) from error
    if changed is not None:
        raise ModelChanged(
            f"model: '{changed}' changed after this process had started, so the engine may have "
            "loaded what was there before: start it again, or name the weights with model_revision"
        )


def process_started_ns() -> int:
    """Returns when this process started, in nanoseconds since the epoch, up to a tick late."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    ticks = int(fields[19])  # starttime, see proc(5)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return int((time.time() - age + _TICK_S) * 1e9)


def _refuse_switched(snapshot: Path, paths: Iterable[Path], since_ns: int) -> None:
    """Refuses a snapshot to which a reference or a link was switched at `since_ns` or later.

    A repository's only snapshot may be the engine's own download. Then the repository is as new as
    its reference, and each file as its link. Such changes do not count.

    Raises:
        ModelChanged: names the reference or the link.
    """
    repository = snapshot.parents[1]
    try:
        references = [path for path in (repository / "refs").rglob("*") if path.is_file()]
        ours = [path for path in references if path.read_text().strip() == snapshot.name]
        if sum(1 for _ in snapshot.parent.iterdir()) < 2:
            paths = [path for path in paths if path.stat().st_mtime_ns <= since_ns]
            ours = ours if repository.stat().st_mtime_ns <= since_ns else []
        states = [(path, FileIdentity.of(path.lstat())) for path in (*ours, *paths)]
    except (OSError, UnicodeError) as error:
        raise ModelChanged(
            f"model: '{snapshot}' changed while it was read; try again when no process writes to it"
        ) from error
    changed = next((path for path, state in states if state.changed_ns > since_ns), None)
    if changed is not None:
        raise ModelChanged(
            f"model: '{changed}' was switched after this process had started, so the engine may "
            "have loaded another snapshot: start it again, or name the weights with model_revision"
        )


def _is_blob(path: Path) -> bool:
    """Returns whether `path` is a link to a file of the Hugging Face cache."""
    try:
        return path.is_symlink() and path.readlink().parent.name == "blobs"
    except OSError:
        return False


def _changed(path: Path, since_ns: int, seen: set[Path]) -> Iterator[Path]:
    """Yields the changed ones of the links and folders on `path`, and of `path` itself."""
    at, todo, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    while todo:
        at = at.parent if (part := todo.pop()) == ".." else at / part
        if at in seen and not at.is_symlink():
            continue
        seen.add(at)
        state = at.lstat()
        identity = FileIdentity.of(state)
        if stat.S_ISLNK(state.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = at.readlink()
            todo += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            if identity.changed_ns > since_ns:
                yield at
            at = Path(target.anchor) if target.is_absolute() else at.parent
        elif todo:
            # Entries that come and go set both times; a rename sets the ctime alone.
            if identity.ctime_ns > since_ns and identity.ctime_ns != identity.mtime_ns:
                yield at
        elif identity.changed_ns > since_ns:
            yield at
