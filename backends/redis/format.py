"""The names and values of a store in Redis.

::

    <prefix>b:<key>            head | metadata | the frame, or its first part
    <prefix>p:<key>:<nonce>:1  the second part of a frame too long for one value, and so on
    <prefix>c:<key>            sorted set by time: keys and tokens of the blocks that follow
    <prefix>pins               hash: keys of the pinned blocks, each with a `Pin`

No value is above `MAX_VALUE_NBYTES`. The parts of a frame are stored first and the head last, and
the head contains a random number of this write, which is in their names. So a reader finds a whole
frame of one writer, or none. Parts have names of their own, so that a cluster spreads them over its
nodes.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass
from typing import NamedTuple

from kvconnect.errors import ConfigurationError
from kvconnect.keys import KEY_NBYTES, BlockKey

MAX_VALUE_NBYTES = 4 << 20
"""The most bytes of a value: one of 2 MiB moves three times as fast as one of 32 MiB."""

PART_NBYTES = 2 << 20
"""The bytes in each value of a frame that does not fit into one value."""

_MAGIC = b"KVR1"
# magic, bytes of metadata, bytes of the frame, bytes of it in each value, nonce, Unix seconds
_HEAD = struct.Struct("<4sIQI8sd")
HEAD_NBYTES = _HEAD.size
NONCE_NBYTES = 8
_MAX_METADATA_NBYTES = 1 << 20
# The most parts of a block. A damaged head may claim more, and every command about a block is sent
# for each part.
_MAX_FRAME_NBYTES = 4 << 30


class Head(NamedTuple):
    """The head of a block's value. A tuple: a lookup makes one for every block.

    Attributes:
        frame_nbytes: the bytes of the whole frame.
        part_nbytes: the bytes of the frame in each value; the last may have fewer.
        nonce: the random number in the names of the parts.
        created_at: Unix seconds.
    """

    metadata_nbytes: int
    frame_nbytes: int
    part_nbytes: int
    nonce: bytes
    created_at: float

    @classmethod
    def of(cls, frame_nbytes: int, metadata_nbytes: int, nonce: bytes) -> Head:
        """Returns the head of a frame that is about to be stored.

        Raises:
            ConfigurationError: the frame is too long.
        """
        if frame_nbytes > _MAX_FRAME_NBYTES:
            raise ConfigurationError(
                f"block: a frame of {frame_nbytes} bytes; Redis stores take at most "
                f"{_MAX_FRAME_NBYTES}; take fewer tokens_per_block"
            )
        whole = HEAD_NBYTES + metadata_nbytes + frame_nbytes <= MAX_VALUE_NBYTES
        part_nbytes = frame_nbytes if whole else PART_NBYTES
        return cls(metadata_nbytes, frame_nbytes, part_nbytes, nonce, time.time())

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Head | None:
        """Returns the head that `data` begins with; ``None`` if there is none or it is damaged."""
        if len(data) < HEAD_NBYTES:
            return None
        magic, *fields = _HEAD.unpack_from(data)
        metadata_nbytes, frame_nbytes, part_nbytes, _, created_at = fields
        plausible = (
            (part_nbytes == frame_nbytes or part_nbytes == PART_NBYTES < frame_nbytes)
            and frame_nbytes <= _MAX_FRAME_NBYTES
            and metadata_nbytes <= _MAX_METADATA_NBYTES
            and math.isfinite(created_at)
        )
        if magic != _MAGIC or not plausible:
            return None
        return cls(*fields)

    def pack(self) -> bytes:
        """Returns the bytes that `parse` reads."""
        return _HEAD.pack(_MAGIC, *self)

    @property
    def num_parts(self) -> int:
        """The number of the block's values, the one with the head included."""
        return max(1, -(-self.frame_nbytes // max(1, self.part_nbytes)))

    @property
    def stored_nbytes(self) -> int:
        """The bytes of all values of the block."""
        return HEAD_NBYTES + self.metadata_nbytes + self.frame_nbytes

    @property
    def value_nbytes(self) -> int:
        """The bytes of the value with the head."""
        return HEAD_NBYTES + self.metadata_nbytes + min(self.part_nbytes, self.frame_nbytes)

    def part(self, number: int) -> slice:
        """Returns the slice of the frame that part `number` holds."""
        start = number * self.part_nbytes
        return slice(start, min(start + self.part_nbytes, self.frame_nbytes))


_PIN = struct.Struct("<dQq")


class Pin(NamedTuple):
    """The record of a pinned block.

    Attributes:
        until: Unix seconds; ``inf``: until it is unpinned.
        nbytes: of the block's values.
        expires_at_ms: Unix milliseconds at which the block expires once it is not pinned; 0: never.
    """

    until: float
    nbytes: int
    expires_at_ms: int

    @classmethod
    def parse(cls, data: object) -> Pin | None:
        """Returns the pin that `data` holds; ``None`` if it holds none."""
        if not isinstance(data, bytes) or len(data) != _PIN.size:
            return None
        found = cls(*_PIN.unpack(data))
        return None if math.isnan(found.until) else found

    def pack(self) -> bytes:
        """Returns the bytes that `parse` reads."""
        return _PIN.pack(*self)

    @property
    def has_outlived(self) -> bool:
        """Returns whether both the pin and the block's own time are over."""
        now = time.time()
        return self.until <= now and 0 < self.expires_at_ms <= 1e3 * now


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a block has in Redis."""

    prefix: bytes

    @property
    def probe(self) -> bytes:
        """A name that no block has, to test which commands a server accepts."""
        return self.prefix + b"probe"

    @property
    def pins(self) -> bytes:
        """The name of the hash of pins."""
        return self.prefix + b"pins"

    def block(self, key: BlockKey) -> bytes:
        """Returns the name of the block's first or only value."""
        return b"%sb:%s" % (self.prefix, key.hex().encode())

    def parts(self, key: BlockKey, head: Head) -> list[bytes]:
        """Returns the names of the block's other values."""
        stem = b"%sp:%s:%s:" % (self.prefix, key.hex().encode(), head.nonce.hex().encode())
        return [stem + b"%d" % number for number in range(1, head.num_parts)]

    def children(self, parent: BlockKey | None) -> bytes:
        """Returns the name of the index of the blocks that follow `parent`."""
        return b"%sc:%s" % (self.prefix, b"-" if parent is None else parent.hex().encode())

    def key(self, name: bytes) -> BlockKey | None:
        """Returns the block whose first value `name` is; ``None`` for other names."""
        stem = self.prefix + b"b:"
        if not name.startswith(stem) or len(name) != len(stem) + 2 * KEY_NBYTES:
            return None
        try:
            return BlockKey(bytes.fromhex(name[len(stem) :].decode("ascii")))
        except ValueError:
            return None
