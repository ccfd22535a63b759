"""The digest of a model directory: configuration and weights, never the index alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

from kvconnect.errors import ConfigurationError

__all__ = ["model_digest"]

_WHOLE = 256 << 20
_STRIPES = 4096
_STRIPE = 64 << 10
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# What a transformers release or a download writes without changing the model.
_VOLATILE = {"transformers_version", "_name_or_path"}


def model_digest(directory: str | Path, *, cache_dir: str | Path | None = None) -> bytes:
    """32 bytes that differ between any two models, fine-tunes and revisions included.

    Covers ``config.json`` and, for every weight file, name, size and content: whole up to 256 MiB,
    beyond that 4,096 stripes of 64 KiB at fixed pseudo-random offsets. Content digests are cached
    in `cache_dir` (default ``~/.cache/kvconnect/digests``) by path, inode, size, mtime and ctime.
    Blocks on file I/O.

    Raises:
        ConfigurationError: no such directory, no ``config.json`` in it, or no weights.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ConfigurationError(f"model: '{root}' is not a directory")
    config = root / "config.json"
    if not config.is_file():
        raise ConfigurationError(f"model: '{root}' has no config.json")
    weights = sorted(path for path in root.rglob("*") if path.suffix in _WEIGHTS and path.is_file())
    if not weights:
        raise ConfigurationError(f"model: '{root}' has no weight files ({', '.join(_WEIGHTS)})")
    try:
        settings = json.loads(config.read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"model: '{config}' is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"model: '{config}' is not a JSON object")
    kept = {name: value for name, value in settings.items() if name not in _VOLATILE}
    state = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=32)
    cache = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "kvconnect" / "digests"
    for path in weights:
        name = path.relative_to(root).as_posix().encode()
        state.update(len(name).to_bytes(8, "little") + name + _file_digest(path, cache))
    return state.digest()


def _file_digest(path: Path, cache: Path) -> bytes:
    stat = path.stat()
    # ctime cannot be set back: other weights under the same name and mtime are seen.
    identity = (path.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    entry = cache / hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    try:
        known = entry.read_bytes()
    except OSError:
        known = b""
    if len(known) == 32:
        return known
    digest = _content_digest(path, stat.st_size)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(digest)
        temporary.replace(entry)
    except OSError:
        pass  # a cache that cannot be written costs the next start its time, nothing else
    return digest


def _content_digest(path: Path, size: int) -> bytes:
    state = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=32)
    with path.open("rb") as file:
        if size <= _WHOLE:
            while chunk := file.read(8 << 20):
                state.update(chunk)
        else:
            # Fixed seed: every process reads the same stripes. Sorted: the disk reads forward.
            # The first one holds the header; the last one may be short and counts as well.
            last = (size - 1) // _STRIPE
            sample = random.Random(size).sample(range(1, last), _STRIPES - 2)
            for index in sorted({0, *sample, last}):
                file.seek(index * _STRIPE)
                state.update(file.read(_STRIPE))
    return state.digest()
