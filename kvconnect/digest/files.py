"""The files of a model directory, opened once, so that the loaded bytes are the digested ones."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Self

from kvconnect.digest.identity import FileIdentity
from kvconnect.digest.weight_files import (
    WEIGHTS,
    WeightFiles,
    chooses,
    is_regular,
    regular_files,
    weight_map,
)
from kvconnect.errors import ConfigurationError, ModelChanged

_ADAPTER = "adapter_config.json"
_SETTINGS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_TEMPLATES = "additional_chat_templates"
# Longer than one tick, 10 ms at most, of the clock that the kernel uses for ctimes.
_TICK_S = 0.05
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in the directory blocks no one


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file, and the state in which it was opened."""

    descriptor: int
    identity: FileIdentity


class ModelFiles:
    """The files of a model directory, opened when this was made; a context manager.

    Every file that transformers loads is opened once. So the reads here do not see that the
    directory or a file was replaced. They see writes into an open file; a `check` after the last
    read detects those.

    The open files are all files of the directory itself and its chat templates. Of files with
    weights, only those that transformers loads are open: ``model.safetensors``, or the files that
    its index names; with an adapter, the adapter's. If there are none of these, all weights are
    open, also in folders. The state of files that another loader may use is recorded.

    Args:
        directory: the model's directory. The name is resolved once.

    Attributes:
        directory: as given.
        files: the open files by name, relative to the directory.
        weights: the names of the open files with weights, in the order of the digest.
        beside: the state of the other files that a loader may use, by name and in order: weights,
            indexes, settings, code that the configuration names.
        folders: the folders with files of `weights` or `beside`.
        aliases: links to such folders, each with the name of its folder in `folders`.

    Raises:
        ConfigurationError: the directory does not exist, or cannot be read.
        ModelChanged: a file was removed meanwhile.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        with ExitStack() as stack:
            self._root = _open_directory(self.directory)
            stack.callback(os.close, self._root)
            self._opened: dict[str, OpenFile] = {}
            for name in (*regular_files(self._root, "."), *regular_files(self._root, _TEMPLATES)):
                if not name.endswith(WEIGHTS):
                    self._open(stack, name)
            self._found = WeightFiles.under(self._root)
            chosen = self._loaded_weights(stack) or self._all_weights()
            self.weights = tuple(sorted(chosen, key=PurePosixPath))
            for name in self.weights:
                self._open(stack, name)
            self.folders = tuple(self._found.folders)
            self.aliases: Mapping[str, str] = MappingProxyType(self._found.aliases)
            beside = {name: self._existing(name) for name in self._beside()}
            _wait_a_tick([*(one.identity for one in self._opened.values()), *beside.values()])
            self.files: Mapping[str, OpenFile] = MappingProxyType(
                {name: _again(file) for name, file in self._opened.items()}
            )
            self.beside: Mapping[str, FileIdentity] = MappingProxyType(
                {name: self._existing(name) for name in beside}
            )
            self._open_files = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def check(self) -> None:
        """Checks that no file has changed since it was opened.

        An added file counts as a change if it has weights, or decides which are loaded. Other files
        may be added meanwhile, such as logs.

        Raises:
            ModelChanged: a file was written to, replaced, added or removed; the message names it.
        """
        states = {
            name: file.identity
            for name, file in self.files.items()
            if name.endswith((*WEIGHTS, *_SETTINGS))
        }
        for name, identity in (states | dict(self.beside)).items():
            if self._state(name) != identity:
                raise _changed(self.directory, name)
        now, then = WeightFiles.under(self._root), self._found
        added = {*now.weights, *now.settings} - {*then.weights, *then.settings}
        if added or now.aliases != then.aliases:
            raise _changed(self.directory, min(added, default="."))

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Opens a file of `weights` or `beside` again for reading; yields its descriptor.

        Raises:
            ModelChanged: the file was replaced or has changed since it was found.
            ConfigurationError: the file cannot be read.
        """
        descriptor = self._descriptor(name)
        try:
            found = self.files[name].identity if name in self.weights else self.beside[name]
            if FileIdentity.of(os.fstat(descriptor)) != found:
                raise _changed(self.directory, name)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def linked(self) -> Iterator[Path]:
        """Yields a temporary directory of links to the open files, for loaders that need a path.

        Raises:
            ConfigurationError: the links cannot be made.
        """
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
        """Returns the content of the open file `name`."""
        return _read(self.files[name].descriptor)

    def _loaded_weights(self, stack: ExitStack) -> set[str]:
        named = self._json("config.json").get("transformers_weights")
        if not isinstance(named, str):
            whole, index = "model.safetensors", "model.safetensors.index.json"
            named = whole if is_regular(self._root, whole) else index
        found = {named}
        if named.endswith(".index.json"):
            found = set()
            if self._inside(named):
                self._open(stack, named)
                found = set(weight_map(_read(self._opened[named].descriptor)).values())
        weights = {name for name in found if self._inside(name)}
        if weights and _ADAPTER in self._opened:
            # The adapter's scale changes the result as its weights do.
            adapter = ("adapter_model.safetensors", "adapter_model.bin")
            weights |= {_ADAPTER, *(name for name in adapter if self._inside(name))}
        return weights

    def _all_weights(self) -> set[str]:
        linked = self._found.linked
        return {
            name
            for name in self._found.weights
            if name.endswith(WEIGHTS) and PurePosixPath(name).parent.as_posix() not in linked
        }

    def _beside(self) -> list[str]:
        found = self._found
        beside = {*found.weights, *found.settings} - {*self.weights, "config.json"}
        if "auto_map" in self._json("config.json"):
            beside |= set(found.code)
        indexes = {name for name in beside if name in self._opened and ".index." in name}
        beside -= {name for name in indexes if not self._chooses(name)}
        return sorted(beside, key=PurePosixPath)

    def _chooses(self, index: str) -> bool:
        def opened(name: str) -> int | None:
            return self._opened[name].descriptor if name in self._opened else None

        return chooses(index, _read(self._opened[index].descriptor), self._found.weights, opened)

    def _state(self, name: str) -> FileIdentity | None:
        try:
            return FileIdentity.of(os.stat(name, dir_fd=self._root))
        except OSError:
            return None

    def _existing(self, name: str) -> FileIdentity:
        state = self._state(name)
        if state is None:
            raise _changed(self.directory, name)
        return state

    def _json(self, name: str) -> Mapping[str, object]:
        """Returns the JSON object in `name`, or an empty one if there is none.

        Errors are reported by the reader of the settings.
        """
        with suppress(ValueError, KeyError):
            settings = json.loads(_read(self._opened[name].descriptor))
            if isinstance(settings, dict):
                return settings
        return {}

    def _inside(self, name: str) -> bool:
        path = PurePosixPath(name)
        inside = not path.is_absolute() and ".." not in path.parts
        return inside and is_regular(self._root, name)

    def _open(self, stack: ExitStack, name: str) -> None:
        if name not in self._opened:
            descriptor = self._descriptor(name)
            stack.callback(os.close, descriptor)
            self._opened[name] = OpenFile(descriptor, FileIdentity.of(os.fstat(descriptor)))

    def _descriptor(self, name: str) -> int:
        try:
            return os.open(name, _READ, dir_fd=self._root)
        except FileNotFoundError as error:
            raise _changed(self.directory, name) from error
        except OSError as error:
            raise ConfigurationError(
                f"model: '{self.directory / name}' cannot be read ({error.strerror})"
            ) from error


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


def _again(file: OpenFile) -> OpenFile:
    return OpenFile(file.descriptor, FileIdentity.of(os.fstat(file.descriptor)))


def _wait_a_tick(states: Iterable[FileIdentity]) -> None:
    """Blocks until the clock's tick of the newest change has ended, up to 50 ms.

    A later change then has another time.
    """
    newest = max((state.changed_ns for state in states), default=0)
    wait_s = newest / 1e9 + _TICK_S - time.time()
    if wait_s > 0:
        time.sleep(min(wait_s, _TICK_S))
