"""Digests of LoRA adapters: of their files, since an engine's numbers mean nothing elsewhere."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvconnect.digest.content import Content, content_digests
from kvconnect.digest.identity import FileIdentity
from kvconnect.errors import ConfigurationError, ModelChanged
from kvconnect.text import shown
from kvconnect.trace import count, warn_once

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_SETTINGS = ("adapter_config.json", "new_embeddings.safetensors")

_Files = tuple[tuple[str, FileIdentity], ...]


class AdapterDigests:
    """The digest of each adapter that a request names, made once, on a thread.

    An engine keeps an adapter that it has loaded. So an adapter whose files change afterwards no
    longer has a digest: its results may be of the old or the new files. The same holds for all
    directories of a name once it was given to a second one: the engine may drop an adapter and load
    the other. Belongs to one thread.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int | str, str], tuple[_Files, Future[str]]] = {}
        self._directories: dict[int | str, str] = {}
        self._refused: set[int | str] = set()
        self._thread = ThreadPoolExecutor(1, "kvconnect-adapter")  # started by the first digest

    def find(self, adapter: int | str, directory: str) -> Future[str] | None:
        """Returns the digest of `adapter` in `directory`, perhaps still being made.

        Never blocks for long. Returns ``None`` if the directory has no adapter in it, if it has
        changed, or if `adapter` ever was the name of another. The future ends with a
        `KvConnectError` if the files cannot be read.

        Args:
            adapter: the engine's name or number of the adapter.
            directory: the directory of the adapter's files.
        """
        place = (adapter, directory)
        if adapter in self._refused:
            return None
        try:
            files = _files(Path(directory))
        except OSError:
            files = ()
        if place in self._known:
            loaded, digest = self._known[place]
            if files == loaded:
                return digest
            self._refuse(adapter, f"'{directory}' changed after the engine had loaded it")
            return None
        if not files:
            # The engine may have loaded this name from there, as from a hub.
            self._refuse(adapter, f"'{directory}' is no directory with a LoRA adapter in it")
            return None
        real = os.path.realpath(directory)
        if self._directories.setdefault(adapter, real) != real:
            self._refuse(adapter, f"'{directory}' goes by the name of another, {shown(adapter)}")
            return None
        digest = self._thread.submit(adapter_digest, Path(directory), files)
        self._known[place] = files, digest
        return digest

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _refuse(self, adapter: int | str, why: str) -> None:
        self._refused.add(adapter)
        count("adapter.refused")
        warn_once(f"adapter {why}", f"LoRA adapter {why}: its prompts are not cached")


def adapter_digest(directory: Path, files: _Files = ()) -> str:
    """Returns 64 hexadecimal digits that differ between any two adapters.

    The digest covers the adapter's settings and the whole content of its weights. Blocks on file
    I/O.

    Args:
        directory: the directory of the adapter.
        files: the files that it must have, as they were found; empty: any.

    Raises:
        ConfigurationError: there is no adapter in `directory`, or it cannot be read.
        ModelChanged: it changed meanwhile, or is not `files`.
    """
    try:
        before = _files(directory)
        if not before:
            raise ConfigurationError(
                f"adapter: '{directory}' has no files of a LoRA adapter; give its directory"
            )
        digest = _digest(directory, before)
        if _files(directory) != (files or before):
            raise ModelChanged(
                f"adapter: '{directory}' changed while it was read; try again when no process "
                "writes to it"
            )
    except OSError as error:
        raise ConfigurationError(
            f"adapter: '{directory}' cannot be read ({error.strerror})"
        ) from error
    return digest


def _files(directory: Path) -> _Files:
    names = sorted(
        entry.name
        for entry in os.scandir(directory)
        if entry.is_file() and (entry.name in _SETTINGS or entry.name.endswith(_WEIGHTS))
    )
    return tuple((name, FileIdentity.of((directory / name).stat())) for name in names)


def _digest(directory: Path, files: _Files) -> str:
    state = hashlib.blake2b(digest_size=32, person=b"kvc-adapter")
    for name, identity in files:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            [content] = content_digests([Content(descriptor, identity.size)])
        finally:
            os.close(descriptor)
        state.update(len(name.encode()).to_bytes(8, "little") + name.encode() + content)
    return state.hexdigest()
