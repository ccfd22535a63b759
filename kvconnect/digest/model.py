"""The digest of a model directory: configuration and weights, never the index alone."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from kvconnect.digest.cache import DigestCache
from kvconnect.digest.content import Content, content_digests
from kvconnect.digest.files import WEIGHTS, ModelFiles
from kvconnect.digest.identity import FileIdentity
from kvconnect.errors import ConfigurationError
from kvconnect.user_cache import cache_directory

__all__ = ["check_revision", "digest_of", "model_digest"]

# What a transformers release or a download writes without changing the model.
_VOLATILE = {"transformers_version", "_name_or_path"}
# A file that changed so shortly before it was read may change again under the same times.
_SETTLED_NS = 2 * 10**9


def model_digest(
    directory: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None
) -> bytes:
    """32 bytes that differ between any two models, fine-tunes and revisions included.

    Covers ``config.json`` and, for every weight file that is loaded, name, size and whole content.
    Digests of contents are kept in `cache_dir` (default ``kvconnect`` in the user's cache
    directory) by device, inode, size, mtime and ctime. Blocks on file I/O.

    Args:
        directory: of the model.
        revision: stands for the weights, which are then not read.
        cache_dir: where digests of files are kept.

    Raises:
        ConfigurationError: no such directory, no ``config.json`` in it, or no weights.
        ModelChanged: the directory changed meanwhile.
    """
    with ModelFiles(directory) as files:
        digest = digest_of(files, revision=revision, cache_dir=cache_dir)
        files.check()
        return digest


def digest_of(
    files: ModelFiles, *, revision: str | None = None, cache_dir: str | Path | None = None
) -> bytes:
    """`model_digest` of open files; the caller checks afterwards that none has changed."""
    if "config.json" not in files.files:
        raise ConfigurationError(f"model: '{files.directory}' has no config.json")
    check_revision(revision)
    if not files.weights:
        names = ", ".join(WEIGHTS)
        raise ConfigurationError(f"model: '{files.directory}' has no weight files ({names})")
    settings = json.dumps(_settings(files), sort_keys=True).encode()
    if revision is not None:
        state = hashlib.blake2b(settings, digest_size=32, person=b"kvc-revision")
        state.update(revision.encode("utf-8", "surrogatepass"))
        return state.digest()
    state = hashlib.blake2b(settings, digest_size=32)
    cache = DigestCache(_default_directory() if cache_dir is None else Path(cache_dir))
    for name, content in zip(files.weights, _weight_digests(files, cache), strict=True):
        state.update(len(name.encode()).to_bytes(8, "little") + name.encode() + content)
    return state.digest()


def check_revision(revision: object) -> None:
    """Refuse a `revision` that names nothing.

    Raises:
        ConfigurationError: it is neither a non-empty string nor ``None``.
    """
    if revision is not None and not (isinstance(revision, str) and revision.strip()):
        raise ConfigurationError(
            f"model_revision: {revision!r} must be a non-empty string, for example "
            "'org/name@commit', or None"
        )


def _default_directory() -> Path | None:
    try:
        return cache_directory()
    except RuntimeError:  # a user without a home directory
        return None


def _settings(files: ModelFiles) -> dict[str, object]:
    path = files.directory / "config.json"
    try:
        settings = json.loads(files.read("config.json"))
    except ValueError as error:
        raise ConfigurationError(f"model: '{path}' is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"model: '{path}' is not a JSON object")
    return {name: value for name, value in settings.items() if name not in _VOLATILE}


def _weight_digests(files: ModelFiles, cache: DigestCache) -> list[bytes]:
    weights = [files.files[name] for name in files.weights]
    known = cache.read()
    missing = {file.identity: file for file in weights if file.identity not in known}
    if missing:
        started_ns = time.time_ns()
        contents = [Content(file.descriptor, file.identity.size) for file in missing.values()]
        try:
            made = dict(zip(missing, content_digests(contents), strict=True))
        except OSError as error:
            raise ConfigurationError(
                f"model: '{files.directory}' cannot be read ({error.strerror})"
            ) from error
        files.check()
        cache.add({key: made[key] for key in made if _settled(key, started_ns)})
        known |= made
    return [known[file.identity] for file in weights]


def _settled(identity: FileIdentity, started_ns: int) -> bool:
    return identity.changed_ns <= started_ns - _SETTLED_NS
