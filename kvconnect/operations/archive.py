"""The file of ``export`` and ``import``: records of blocks, a chain of checksums, a manifest.

::

    header | record of a block, any number | record of the manifest
    record = kind, bytes of metadata, bytes of the frame | metadata | frame | checksum

The checksum of a record covers its bytes and the checksum before it; the first one covers the
header. So the last one covers the whole file, and a file that was cut short can be continued after
its last whole record. With a key the checksums authenticate the file: only an owner of the key can
make one that is accepted.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.backends.entries import BlockMetadata
from kvconnect.backends.guard.encryption import read_key_file
from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.keys import KEY_NBYTES, BlockKey

_MAGIC = b"KVCEXPRT"
_VERSION = 1
_HEADER = struct.Struct("<8sHB5x16s")  # magic, version, has a key, a random number
_RECORD = struct.Struct("<B3xIQ")  # kind, bytes of metadata, bytes of the frame
_BLOCK, _MANIFEST = 1, 2
_CHECKSUM_NBYTES = 32
_LONGEST_METADATA = 1 << 26
_LONGEST_FRAME = 1 << 30
_NOT_BY_SERVER = "a server does not have it: give the URL of a store, or export without a key"


def file_key(path: str | None) -> bytes:
    """Returns the key of checksums for the key file `path`; empty: none is used.

    Raises:
        ConfigurationError: the file cannot be read, or is too short or too long for a key.
    """
    if path is None:
        return b""
    return hashlib.blake2b(
        read_key_file(path), digest_size=_CHECKSUM_NBYTES, person=b"kvc-export"
    ).digest()


def part_of(path: Path) -> Path:
    """Returns the path that the file `path` has until it is complete.

    Raises:
        ConfigurationError: `path` is a directory, a device, a pipe or a link.
    """
    if not path.name or path.is_dir():
        raise ConfigurationError(f"{path}: is a directory; give the path of a file")
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ConfigurationError(f"{path}: is no regular file; give the path of one")
    return path.with_name(f"{path.name}.part")


@dataclass(slots=True)
class ModelPart:
    """The blocks of one model and cache geometry in a file.

    Attributes:
        digest: the first 16 bytes of the model's digest, hexadecimal.
        geometry: 16 bytes that stand for the geometry of its cache, hexadecimal.
        layouts: fingerprints of the layouts of the frames, hexadecimal, sorted.
        blocks, bytes: the blocks and the bytes of their frames.
        tokens: of the blocks of pool group 0.
    """

    digest: str
    geometry: str
    layouts: list[str] = field(default_factory=list)
    blocks: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, block: StoredBlock) -> None:
        """Counts `block`."""
        self.blocks += 1
        self.bytes += block.data.numel()
        if block.group == 0 and block.tokens is not None:
            self.tokens += len(block.tokens)
        layout = frame.check_header(block.data, block.key, None).fingerprint.hex()
        if layout not in self.layouts:
            self.layouts = sorted([*self.layouts, layout])


@dataclass(slots=True)
class Manifest:
    """The contents of a file by model; the keys are the models' tags, hexadecimal."""

    models: dict[str, ModelPart] = field(default_factory=dict)

    def add(self, block: StoredBlock) -> None:
        """Counts `block`."""
        tag = block.model.hex()
        self.models.setdefault(tag, ModelPart(tag[:32], tag[32:])).add(block)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return sum(part.blocks for part in self.models.values())

    def to_bytes(self) -> bytes:
        """Returns the manifest as JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()


class ArchiveStream:
    """The bytes of a file of ``export``, written one after the other. Every method blocks.

    Args:
        file: takes the bytes; it need not be seekable.
        key: of the checksums; empty: none.

    Attributes:
        keys: the blocks that were written.

    Raises:
        OSError: `file` takes no bytes.
    """

    def __init__(self, file: BinaryIO, key: bytes) -> None:
        self._file = file
        self._key = key
        self._begin()

    def add(self, block: StoredBlock) -> None:
        """Writes a block, whose frame is sound."""
        metadata = block.key + BlockMetadata.of(block).to_bytes()
        self._write(_BLOCK, metadata, block.data.numpy().data)
        self._manifest.add(block)
        self.keys.add(block.key)

    def flush(self) -> None:
        """Passes what was written on to the system: it survives the process."""
        self._file.flush()

    def end(self) -> Manifest:
        """Writes and returns the manifest."""
        self._write(_MANIFEST, self._manifest.to_bytes(), memoryview(b""))
        self._file.flush()
        return self._manifest

    def _begin(self) -> None:
        header = _HEADER.pack(_MAGIC, _VERSION, bool(self._key), os.urandom(16))
        self._file.write(header)
        self._checksum = _chained(self._key, b"", header)
        self._manifest = Manifest()
        self.keys: set[BlockKey] = set()

    def _write(self, kind: int, metadata: bytes, data: memoryview) -> None:
        head = _RECORD.pack(kind, len(metadata), len(data))
        self._checksum = _chained(self._key, self._checksum, head, metadata, data)
        for piece in (head, metadata, data, self._checksum):
            self._file.write(piece)


class ArchiveWriter(ArchiveStream):
    """A file that is being written; continues one that was cut short. Every method blocks.

    Args:
        path: the path of the file; made if it is missing, readable by its owner only.
        key: the key of its checksums; empty: none.

    Attributes:
        keys: the blocks that are in the file.

    Raises:
        ConfigurationError: the file cannot be opened, or another process writes to it.
        OSError: the file cannot be written to.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self._key = key
        self._path = path
        self._manifest = Manifest()
        self.keys = set()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigurationError(f"{path}: another process writes to it") from error
        try:
            if not self._continue():
                self.restart()
        except BaseException:
            self._file.close()
            raise

    def restart(self) -> None:
        """Empties the file."""
        self._file.seek(0)
        self._file.truncate()
        self._begin()

    def finish(self, path: Path) -> Manifest:
        """Writes the manifest, makes the file durable, and renames it to `path`."""
        manifest = self.end()
        os.fsync(self._file.fileno())
        self._path.replace(path)
        return manifest

    def close(self) -> None:
        """Closes the file; written records stay."""
        self._file.close()

    def _continue(self) -> bool:
        """Reads the whole records and cuts off the rest; false if the key is another one."""
        try:
            reader = ArchiveReader(self._path, self._key)
        except (BadFrame, ConfigurationError):
            return False
        with reader:
            end = reader.end
            try:
                for block in reader.blocks():
                    self._manifest.add(block)
                    self.keys.add(block.key)
                    end = reader.end
            except BadFrame:
                pass  # the record at its end, which was being written
            self._checksum = reader.checksum_at_end
        self._file.seek(end)
        self._file.truncate()
        return True


class ArchiveReader:
    """A file that is being read, from its beginning to its end. Every method blocks.

    Args:
        path: of the file; of a `stream` the name in errors.
        key: of its checksums; empty: none is given; ``None``: none can be, for a server has none.
        stream: has the bytes of the file, and is closed with this; its ``read`` and ``readinto``
            return less than was wanted at its end only.

    Attributes:
        id: a number that no other file has, hexadecimal.
        manifest: set once all blocks were read.
        end: the offset after the last sound record of a block.
        checksum_at_end: the checksum of that record.

    Raises:
        BadFrame: the file is no archive, or of another version.
        ConfigurationError: the file cannot be opened or is no regular one, or has a key and none
            is given, or the reverse.
    """

    def __init__(
        self, path: Path | str, key: bytes | None, stream: io.BufferedReader | None = None
    ) -> None:
        self._path = path
        self._key = key or b""
        self.manifest: Manifest | None = None
        try:
            self._file = _opened(path) if stream is None else stream
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}") from error
        try:
            self._left = sys.maxsize if stream else os.fstat(self._file.fileno()).st_size
            self._at = 0
            self._checksum = self.checksum_at_end = self._read_header(takes_key=key is not None)
            self.end = self._at
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def blocks(self) -> Iterator[StoredBlock]:
        """Yields the blocks, each after its checksum, frame and metadata were checked.

        Raises:
            BadFrame: the file is damaged, cut short, changed, or was made with another key. The
                blocks yielded before are sound, but the file is not.
        """
        counted = Manifest()
        while True:
            kind, metadata, data = self._read_record()
            if kind == _MANIFEST:
                break
            block = self._block(metadata, data)
            counted.add(block)
            self.end, self.checksum_at_end = self._at, self._checksum
            yield block
        if metadata != counted.to_bytes():
            raise self._bad("its manifest does not fit its blocks")
        if self._file.read(1):
            raise self._bad("something follows its end")
        self.manifest = counted

    def _read_header(self, *, takes_key: bool) -> bytes:
        header = self._file.read(_HEADER.size)
        self._passed(len(header))
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise self._bad("is no file of 'kvconnect export'")
        _, version, has_key, number = _HEADER.unpack(header)
        if version != _VERSION:
            raise self._bad(f"is of version {version}, this is {_VERSION}")
        if has_key and not self._key:
            remedy = "give its key file" if takes_key else _NOT_BY_SERVER
            raise ConfigurationError(f"{self._path}: was made with a key; {remedy}")
        if self._key and not has_key:
            raise ConfigurationError(f"{self._path}: was made without a key; give no key file")
        self.id: str = number.hex()
        return _chained(self._key, b"", header)

    def _read_record(self) -> tuple[int, bytes, Tensor]:
        head = self._take(_RECORD.size)
        kind, metadata_nbytes, nbytes = _RECORD.unpack(head)
        if kind not in {_BLOCK, _MANIFEST} or metadata_nbytes > _LONGEST_METADATA:
            raise self._bad("is damaged")
        if nbytes > _LONGEST_FRAME or (kind == _MANIFEST and nbytes):
            raise self._bad("is damaged")
        metadata = self._take(metadata_nbytes)
        self._expect(nbytes)
        data = torch.empty(nbytes, dtype=torch.uint8)
        view = data.numpy().data
        if self._file.readinto(view) < nbytes:
            raise self._bad("ends too early")
        self._passed(nbytes)
        checksum = _chained(self._key, self._checksum, head, metadata, view)
        if self._take(_CHECKSUM_NBYTES) != checksum:
            raise self._bad("is damaged, or was made with another key")
        self._checksum = checksum
        return kind, metadata, data

    def _block(self, metadata: bytes, data: Tensor) -> StoredBlock:
        key = BlockKey(metadata[:KEY_NBYTES])
        known = BlockMetadata.from_bytes(metadata[KEY_NBYTES:])
        if known is None or len(key) < KEY_NBYTES:
            raise self._bad("has a block without its metadata")
        try:
            frame.check(data, key, None)
        except BadFrame as error:
            raise self._bad(f"has a bad block: {error}") from error
        return known.block(key, data)

    def _take(self, nbytes: int) -> bytes:
        self._expect(nbytes)
        found = self._file.read(nbytes)
        if len(found) < nbytes:
            raise self._bad("ends too early")
        self._passed(nbytes)
        return found

    def _passed(self, nbytes: int) -> None:
        self._at += nbytes
        self._left -= nbytes

    def _expect(self, nbytes: int) -> None:
        # Before memory is taken for it.
        if nbytes > self._left:
            raise self._bad("ends too early")

    def _bad(self, why: str) -> BadFrame:
        return BadFrame(f"{self._path}: {why}; export it again")


def _opened(path: Path | str) -> io.BufferedReader:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # waits for no writer of a pipe
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigurationError(f"{path}: is no regular file; save it to one: it is read twice")
    return os.fdopen(descriptor, "rb")


def _chained(key: bytes, before: bytes, *pieces: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(before, digest_size=_CHECKSUM_NBYTES, key=key, person=b"kvc-archive")
    for piece in pieces:
        state.update(piece)
    return state.digest()
