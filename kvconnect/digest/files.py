"""The files of a model directory, opened once: what is loaded is what is digested."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Self

from kvconnect.digest.identity import FileIdentity
from kvconnect.errors import ConfigurationError, ModelChanged

__all__ = ["ModelFiles", "OpenFile"]

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ADAPTER = "adapter_config.json"
_SETTINGS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_TEMPLATES = "additional_chat_templates"
# Longer than a tick of the clock of which the kernel takes ctimes, 10 ms at most.
_TICK_S = 0.05
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in the directory blocks no one


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file, and the state in which it was opened."""

    descriptor: int
    identity: FileIdentity


class ModelFiles:
    """A model directory as it is now, however long reading it takes; a context manager.

    Another directory under its name, or another file under the name of one, changes nothing in
    what is read here: every file is opened once. What is written into an open file does; a `check`
    after the last read finds that.

    Holds what a loader may want: all files of the directory itself and its chat templates, but of
    weights only those that transformers loads (``model.safetensors``, or the files that the index
    names; with an adapter, its own). If these are not there, all weights, in folders, too.

    Args:
        directory: of the model. Is looked up once.

    Attributes:
        directory: as given.
        files: by name, relative to the directory.
        weights: names of those with weights, in the order in which they are digested.

    Raises:
        ConfigurationError: no such directory, or something in it cannot be read.
        ModelChanged: a file went away meanwhile.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        with ExitStack() as stack:
            self._root = _open_directory(self.directory)
            stack.callback(os.close, self._root)
            self._opened: dict[str, OpenFile] = {}
            for name in _regular(self._root, ".", _TEMPLATES):
                if not name.endswith(WEIGHTS):
                    self._open(stack, name)
            chosen = self._loaded_weights(stack) or set(_all_weights(self._root))
            self.weights = tuple(sorted(chosen, key=PurePosixPath))
            for name in self.weights:
                self._open(stack, name)
            self.files: Mapping[str, OpenFile] = MappingProxyType(_a_tick_later(self._opened))
            self._open_files = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def check(self) -> None:
        """Refuse what was read since these files were opened if one of them has changed.

        Whatever else grows in the directory, as a log does, is no reason.

        Raises:
            ModelChanged: names a file that was written to, replaced or removed.
        """
        for name, file in self.files.items():
            if not name.endswith((*WEIGHTS, *_SETTINGS)):
                continue
            try:
                now = FileIdentity.of(os.stat(name, dir_fd=self._root))
            except OSError:
                now = None
            if now != file.identity:
                raise _changed(self.directory, name)

    @contextmanager
    def linked(self) -> Iterator[Path]:
        """A directory of links to the open files, for loaders that want a path; removed after."""
        with ExitStack() as stack:
            try:
                made = Path(stack.enter_context(TemporaryDirectory(prefix="kvconnect-model-")))
                for name, file in self.files.items():
                    link = made / name
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(f"/proc/{os.getpid()}/fd/{file.descriptor}")
            except OSError as error:
                raise ConfigurationError(
                    f"model: no links to it can be made ({error}); set TMPDIR to a directory that "
                    "can be written"
                ) from error
            yield made

    def read(self, name: str) -> bytes:
        """The content of the open file `name`."""
        return _read(self.files[name].descriptor)

    def _loaded_weights(self, stack: ExitStack) -> set[str]:
        named = self._json("config.json").get("transformers_weights")
        if not isinstance(named, str):
            whole, index = "model.safetensors", "model.safetensors.index.json"
            named = whole if _is_regular(self._root, whole) else index
        found: set[object] = {named}
        if named.endswith(".index.json"):
            if self._inside(named):
                self._open(stack, named)
            shards = self._json(named).get("weight_map")
            found = set(shards.values()) if isinstance(shards, dict) else set()
        weights = {name for name in found if isinstance(name, str) and self._inside(name)}
        if weights and _ADAPTER in self._opened:
            # Its scale changes what is computed no less than its weights do.
            adapter = ("adapter_model.safetensors", "adapter_model.bin")
            weights |= {_ADAPTER, *(name for name in adapter if self._inside(name))}
        return weights

    def _json(self, name: str) -> Mapping[str, object]:
        """Empty if there is none; its reader says so."""
        with suppress(ValueError, KeyError):
            settings = json.loads(_read(self._opened[name].descriptor))
            if isinstance(settings, dict):
                return settings
        return {}

    def _inside(self, name: str) -> bool:
        path = PurePosixPath(name)
        inside = not path.is_absolute() and ".." not in path.parts
        return inside and _is_regular(self._root, name)

    def _open(self, stack: ExitStack, name: str) -> None:
        if name in self._opened:
            return
        try:
            descriptor = os.open(name, _READ, dir_fd=self._root)
        except FileNotFoundError as error:
            raise _changed(self.directory, name) from error
        except OSError as error:
            raise ConfigurationError(
                f"model: '{self.directory / name}' cannot be read ({error.strerror})"
            ) from error
        stack.callback(os.close, descriptor)
        self._opened[name] = OpenFile(descriptor, FileIdentity.of(os.fstat(descriptor)))


def _read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def _changed(directory: Path, name: str) -> ModelChanged:
    return ModelChanged(
        f"model: '{directory / name}' changed while it was loaded; try again when no process "
        "writes to the directory"
    )


def _open_directory(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(
            f"model: '{directory}' is not a directory; give a Hugging Face model directory "
            "(`kvconnect make-model DIR` writes a small random one)"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"model: '{directory}' cannot be read ({error.strerror})"
        ) from error


def _is_regular(root: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=root).st_mode)
    except OSError:  # a link to nothing, or gone
        return False


def _regular(root: int, *folders: str) -> Iterator[str]:
    """Names of the regular files in `folders`, relative to `root`, and of links to such."""
    for folder in folders:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        except OSError:
            continue
        try:
            with os.scandir(descriptor) as entries:
                names = [entry.name for entry in entries]
        finally:
            os.close(descriptor)
        paths = (PurePosixPath(folder, name).as_posix() for name in names)
        yield from (path for path in paths if _is_regular(root, path))


def _all_weights(root: int) -> Iterator[str]:
    for folder, _, names, descriptor in os.fwalk(".", dir_fd=root):
        for name in names:
            if name.endswith(WEIGHTS) and _is_regular(descriptor, name):
                yield PurePosixPath(folder, name).as_posix()


def _a_tick_later(files: Mapping[str, OpenFile]) -> dict[str, OpenFile]:
    """`files`, of which none was changed within this tick: the next change shows in its ctime."""
    newest = max((file.identity.changed_ns for file in files.values()), default=0)
    wait_s = newest / 1e9 + _TICK_S - time.time()
    if wait_s > 0:
        time.sleep(min(wait_s, _TICK_S))
    return {
        name: OpenFile(file.descriptor, FileIdentity.of(os.fstat(file.descriptor)))
        for name, file in files.items()
    }
