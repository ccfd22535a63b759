"""The digest of a file's whole content, hashed by several threads at once."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import xxhash

from kvconnect.digest.progress import in_threads
from kvconnect.errors import ModelChanged

_WHOLE = 256 << 20
_LEAF = 16 << 20
_PIECE = 1 << 20  # is hashed while it is in the processor's cache


class Content(NamedTuple):
    """An open file to hash.

    Attributes:
        descriptor: open for reading; its position is neither used nor moved.
        size: the size of the file in bytes.
    """

    descriptor: int
    size: int


def content_digests(contents: Sequence[Content]) -> list[bytes]:
    """Returns a digest of 32 bytes for each of `contents`.

    For a file of up to 256 MiB it is BLAKE2b of size and content. For a larger file it is BLAKE2b
    of size and leaves: XXH3-128 of every 16 MiB, which is as fast as memory. XXH3 finds accidental
    changes. It does not find two files that were made to have the same digest.

    Blocks on file I/O, and logs progress every 5 seconds.

    Raises:
        ModelChanged: a file is shorter than its size.
        OSError: a file cannot be read.
    """
    parts = [_parts(content) for content in contents]
    hashed = in_threads(_hash, list(chain(*parts)), lambda part: len(part.span))
    digests = []
    for content, own in zip(contents, parts, strict=True):
        leaves = list(islice(hashed, len(own)))
        digests.append(leaves[0] if content.size <= _WHOLE else _root(content.size, leaves))
    return digests


class _Part(NamedTuple):
    content: Content
    span: range


def _parts(content: Content) -> list[_Part]:
    size = content.size
    spans = (
        [range(size)]
        if size <= _WHOLE
        else [range(start, min(start + _LEAF, size)) for start in range(0, size, _LEAF)]
    )
    return [_Part(content, span) for span in spans]


def _hash(part: _Part) -> bytes:
    size = part.content.size
    if size <= _WHOLE:
        state = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=32)
        for piece in _pieces(part):
            state.update(piece)
        return state.digest()
    leaf = xxhash.xxh3_128()
    for piece in _pieces(part):
        leaf.update(piece)
    return leaf.digest()


def _root(size: int, leaves: Sequence[bytes]) -> bytes:
    # Personalised, so that the digest of a small file never equals that of a large file's leaves.
    state = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=32, person=b"kvc-leaves")
    for leaf in leaves:
        state.update(leaf)
    return state.digest()


def _pieces(part: _Part) -> Iterator[memoryview]:
    content, span = part
    start = span.start
    while start < span.stop:
        piece = _buffer.view[: span.stop - start]
        count = os.preadv(content.descriptor, [piece], start)
        if count == 0:
            raise ModelChanged(
                f"model: a weight file of {content.size} bytes ended after {start} while it was "
                "read; try again when no process writes to the directory"
            )
        yield piece[:count]
        start += count


class _Buffer(threading.local):
    """The buffer of each thread. New memory for every leaf would cost as much as its hash."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_PIECE))


_buffer = _Buffer()
