"""The digest of a model directory: configuration and content of all weights."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvconnect.digest.cache import DigestCache, user_directory
from kvconnect.digest.content import Content, content_digests
from kvconnect.digest.files import ModelFiles
from kvconnect.digest.identity import FileIdentity
from kvconnect.digest.weight_files import WEIGHTS
from kvconnect.errors import ConfigurationError

# Settings that a release of transformers or a download changes without changing the model.
_VOLATILE = {"transformers_version", "_name_or_path"}
# A file that changed so shortly before it was read may change again under the same times.
_SETTLED_NS = 2 * 10**9
_OPEN_AT_ONCE = 64  # a training run may have thousands of files


def model_digest(
    directory: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None
) -> bytes:
    """Returns a digest of 32 bytes that differs between any two models, fine-tunes included.

    It covers ``config.json``, and name, size and whole content of every file that any loader reads
    weights or their description from, also in folders. For a directory with the files of one loader
    it is the digest of release 0.1.
    The digests of files are kept in `cache_dir` (default: ``kvconnect`` in the user's cache
    directory) by device, inode, size, mtime and ctime. Blocks on file I/O.

    Args:
        directory: the model's directory.
        revision: identifies the weights, which are then not read.
        cache_dir: the directory for the digests of files.

    Raises:
        ConfigurationError: the directory does not exist, or has no ``config.json`` or no weights.
        ModelChanged: the directory changed meanwhile.
    """
    with ModelFiles(directory) as files:
        digest = digest_of(files, revision=revision, cache_dir=cache_dir)
        files.check()
        return digest


def digest_of(
    files: ModelFiles, *, revision: str | None = None, cache_dir: str | Path | None = None
) -> bytes:
    """Returns the `model_digest` of open files. The caller calls ``files.check()`` afterwards.

    Raises:
        ConfigurationError, ModelChanged: as `model_digest`.
    """
    if "config.json" not in files.files:
        raise ConfigurationError(
            f"model: '{files.directory}' has no config.json; give a Hugging Face model directory"
        )
    check_revision(revision)
    if not files.weights:
        names = ", ".join(WEIGHTS)
        raise ConfigurationError(f"model: '{files.directory}' has no weight files ({names})")
    settings = json.dumps(_settings(files), sort_keys=True).encode()
    cache = DigestCache(user_directory() if cache_dir is None else Path(cache_dir))
    if revision is not None:
        state = hashlib.blake2b(settings, digest_size=32, person=b"kvc-revision")
        state.update(revision.encode("utf-8", "surrogatepass"))
        named = [name for name in files.beside if _says_how_to_read(name)]
        return _with_files_beside(state.digest(), files, named, cache)
    state = hashlib.blake2b(settings, digest_size=32)
    weights = {name: files.files[name].identity for name in files.weights}
    for name, content in zip(weights, _digests(files, weights, cache), strict=True):
        state.update(_counted(name) + content)
    return _with_files_beside(state.digest(), files, list(files.beside), cache)


def check_revision(revision: object) -> None:
    """Checks a `revision` of a model.

    Raises:
        ConfigurationError: `revision` is neither a non-empty string nor ``None``.
    """
    if revision is not None and not (isinstance(revision, str) and revision.strip()):
        raise ConfigurationError(
            f"model_revision: {revision!r} must be a non-empty string, for example "
            "'org/name@commit', or None"
        )


def _settings(files: ModelFiles) -> dict[str, object]:
    path = files.directory / "config.json"
    try:
        settings = json.loads(files.read("config.json"))
    except ValueError as error:
        raise ConfigurationError(f"model: '{path}' is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"model: '{path}' is not a JSON object; replace the file")
    return {name: value for name, value in settings.items() if name not in _VOLATILE}


def _says_how_to_read(name: str) -> bool:
    """Returns whether a file beside the weights is a setting or code.

    A revision stands for weights only, so these are digested with it.
    """
    return name.endswith((".json", ".py")) and ".index." not in name


def _counted(name: str) -> bytes:
    encoded = os.fsencode(name)
    return len(encoded).to_bytes(8, "little") + encoded


def _with_files_beside(
    digest: bytes, files: ModelFiles, names: Sequence[str], cache: DigestCache
) -> bytes:
    """Returns `digest` combined with the files `names` of `files.beside` and the aliases.

    Returns `digest` itself if there are neither.
    """
    if not names and not files.aliases:
        return digest
    state = hashlib.blake2b(digest, digest_size=32, person=b"kvc-beside")
    beside = {name: files.beside[name] for name in names}
    for name, content in zip(beside, _digests(files, beside, cache), strict=True):
        state.update(_counted(name) + content)
    for link, folder in sorted(files.aliases.items()):
        state.update(b"alias" + _counted(link) + _counted(folder))
    return state.digest()


def _digests(
    files: ModelFiles, identities: Mapping[str, FileIdentity], cache: DigestCache
) -> list[bytes]:
    """Returns the digest of each file's content, from `cache` or by a read.

    New digests are added to `cache`, unless the file changed within the last 2 s.

    Raises:
        ConfigurationError: a file cannot be read.
        ModelChanged: a file has changed.
    """
    known = cache.read()
    missing = [name for name, identity in identities.items() if identity not in known]
    for begin in range(0, len(missing), _OPEN_AT_ONCE):
        started_ns = time.time_ns()
        with ExitStack() as stack:
            contents = {
                identities[name]: Content(
                    stack.enter_context(files.opened(name)), identities[name].size
                )
                for name in missing[begin : begin + _OPEN_AT_ONCE]
            }
            try:
                made = dict(zip(contents, content_digests(list(contents.values())), strict=True))
            except OSError as error:
                raise ConfigurationError(
                    f"model: '{files.directory}' cannot be read ({error.strerror})"
                ) from error
        files.check()
        cache.add({key: made[key] for key in made if _settled(key, started_ns)})
        known |= made
    return [known[identity] for identity in identities.values()]


def _settled(identity: FileIdentity, started_ns: int) -> bool:
    return identity.changed_ns <= started_ns - _SETTLED_NS
