"""Finds the files of a model's directory that some loader reads weights or settings from.

`chooses` decides whether an index of weight files selects among files, or only lists all shards.
"""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TypeAlias

from kvconnect.errors import ConfigurationError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""The endings of weight files that most loaders know."""

_RARE_WEIGHTS = (".npz", ".npy", ".tensors", ".ckpt")
_SETTINGS = (
    *("params.json", "*quant*.json", "sparse_attention_config.json", "adapter_config.json"),
    # transformers reads config.4.0.0.json instead, if config.json lists it in configuration_files.
    *("config.*.json", "decision_config.json", "dtypes.json"),
    *("*.index.json", "*.index.*.json"),
)
# vLLM and SGLang unpack *.bin into a folder of this name (load_format=npcache): files without an
# ending, and a list of them.
_NUMPY_FOLDER, _NUMPY_LIST = "np", "weight_names.json"
_MAX_FOLDERS = 10_000

_Folder: TypeAlias = tuple[int, int]
"""A folder's device and inode."""


@dataclass(slots=True)
class WeightFiles:
    """The names of files under a model's directory, relative to it, sorted within a folder.

    Links to folders are followed. A folder with several names is listed under the first; names
    without links come before names with links.

    Attributes:
        weights: the files with weights, of any loader.
        settings: the files that decide which weights a loader reads, or how. Those of the directory
            itself and of folders with weights.
        code: the Python files of the directory itself, which its configuration may name.
        folders: the folders with any of these, as ``.`` or a name.
        linked: the folders of these that are reached by a link.
        aliases: links to folders that are listed under another name, and that name.
    """

    weights: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    linked: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)

    @classmethod
    def under(cls, root: int) -> WeightFiles:
        """Returns the files under the directory with the descriptor `root`; opens no file.

        Raises:
            ConfigurationError: the directory has over 10,000 folders.
        """
        found = cls()
        seen: dict[_Folder, str] = {}
        folders, links = deque(["."]), deque[str]()
        while folders or links:
            is_link = not folders
            name = (links if is_link else folders).popleft()
            listed = _listed(root, name)
            if listed is None:
                continue
            if listed.folder in seen:
                found.aliases[name] = seen[listed.folder]
                continue
            if len(seen) == _MAX_FOLDERS:
                raise ConfigurationError(
                    f"model: its directory has over {_MAX_FOLDERS:,} folders; give a directory "
                    "that holds the model alone, or model_revision"
                )
            seen[listed.folder] = name
            if is_link or PurePosixPath(name).parent.as_posix() in found.linked:
                found.linked.add(name)
            found._take(name, listed.files)
            folders += listed.folders
            links += listed.links
        found.linked &= set(found.folders)
        found.aliases = {
            link: name
            for link, name in found.aliases.items()
            if name == "." or any(PurePosixPath(one).is_relative_to(name) for one in found.folders)
        }
        return found

    def _take(self, folder: str, files: list[str]) -> None:
        base = [PurePosixPath(name).name for name in files]
        unpacked = PurePosixPath(folder).name == _NUMPY_FOLDER and _NUMPY_LIST in base
        weights = [name for name in files if unpacked or name.endswith((*WEIGHTS, *_RARE_WEIGHTS))]
        if not weights and folder != ".":
            return
        patterns = _SETTINGS if folder == "." else ("config.json", *_SETTINGS)
        settings = [
            path
            for path, name in zip(files, base, strict=True)
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if folder == ".":
            self.code += [name for name in files if name.endswith(".py")]
        self.weights += weights
        self.settings += settings
        self.folders.append(folder)


@dataclass(frozen=True, slots=True)
class _Listed:
    folder: _Folder
    files: list[str]
    folders: list[str]
    links: list[str]


def _listed(root: int, name: str) -> _Listed | None:
    """Returns the files, folders and links to folders in `name`, sorted; ``None`` if unreadable."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        with os.scandir(descriptor) as entries:
            kinds = {one.name: _kind(descriptor, one) for one in entries}
    finally:
        os.close(descriptor)
    base = PurePosixPath(name)

    def of(wanted: str) -> list[str]:
        return [(base / one).as_posix() for one in sorted(kinds) if kinds[one] == wanted]

    return _Listed((state.st_dev, state.st_ino), of("file"), of("folder"), of("link"))


def regular_files(root: int, folder: str) -> list[str]:
    """Returns the regular files in a folder of `root`, and links to such files.

    Returns an empty list if the folder cannot be read.
    """
    listed = _listed(root, folder)
    return [] if listed is None else listed.files


def _kind(folder: int, entry: os.DirEntry[str]) -> str:
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    if entry.is_file(follow_symlinks=False):
        return "file"
    try:
        mode = os.stat(entry.name, dir_fd=folder).st_mode
    except OSError:  # a link to nothing, or gone
        return ""
    return "link" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else ""


def is_regular(root: int, name: str) -> bool:
    """Returns whether `name` is a regular file in the open directory `root`, or a link to one."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=root).st_mode)
    except OSError:  # a link to nothing, or gone
        return False


_SAFETENSORS = ".safetensors"
_MAX_HEADER = 100_000_000  # bytes, as the format's own library has it

Opened: TypeAlias = Callable[[str], int | None]
"""Returns the descriptor of a file by its name in the model's directory, if it is open."""


def weight_map(content: bytes) -> Mapping[str, str]:
    """Returns the file name of each tensor, from an index's `content`; empty if there is none."""
    try:
        parsed = json.loads(content)
    except ValueError:
        return {}
    found = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(found, dict):
        return {}
    return {name: file for name, file in found.items() if isinstance(file, str)}


def chooses(index: str, content: bytes, weights: Collection[str], opened: Opened) -> bool:
    """Returns whether loaders that use an index load other weights than loaders that do not.

    They load the same if the index names all files that are called like its shards, and each shard
    has exactly the tensors that the index names, and none twice. (The tensors of pickled files are
    not compared, since loaders load all of them.)

    Args:
        index: the name of the index in the model's directory.
        content: the bytes of the index.
        weights: the names of all files with weights.
        opened: returns the descriptor of a shard.
    """
    placed = weight_map(content)
    if not placed:
        return False
    folder, name = PurePosixPath(index).parent, PurePosixPath(index).name
    whole = name.partition(".index.")[0]  # the name of the file without shards
    stem, _, ending = whole.rpartition(".")
    paths = {file: (folder / file).as_posix() for file in set(placed.values())}
    named = set(paths.values())
    alike = {
        file
        for file in weights
        if PurePosixPath(file).parent == folder
        and PurePosixPath(file).name.startswith(stem)
        and file.endswith(f".{ending}")
    }
    if name != f"{whole}.index.json" or not named <= set(weights) or not alike <= named:
        return True
    if f".{ending}" != _SAFETENSORS:
        return False
    expected: dict[str, set[str]] = {file: set() for file in named}
    for tensor, file in placed.items():
        expected[paths[file]].add(tensor)
    return any(_tensors(opened(file)) != tensors for file, tensors in expected.items())


def _tensors(descriptor: int | None) -> set[str] | None:
    """Returns the names of the tensors in a safetensors file; ``None`` if it is not such a file."""
    if descriptor is None:
        return None
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= _MAX_HEADER:
        return None
    try:
        header = json.loads(os.pread(descriptor, length, 8))
    except ValueError:
        return None
    return header.keys() - {"__metadata__"} if isinstance(header, dict) else None
