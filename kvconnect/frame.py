"""The frame around every stored block: a header that binds the bytes to their key.

``header (128 bytes) | payload | zeros up to a multiple of 4096``. The checksum covers header and
payload, and the header holds the store key: a right block under a wrong key fails like a damaged
one. If the payload is encoded, the flags say how, and its length is that of the encoded bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.keys import FORMAT_VERSION, BlockKey

if TYPE_CHECKING:
    from torch import Tensor

HEADER_NBYTES = 128
ALIGNMENT = 4096
_MAGIC = b"KVCFRAME"
# magic, version, flags, valid tokens, payload length, layout fingerprint, store key
_FIELDS = struct.Struct("<8sHHIQ16s32s")
_FLAGS = slice(10, 12)
_NOT_ENCODED = bytes(2)
CHECKSUM_AT = HEADER_NBYTES - 16
"""The offset of the checksum in the header; it covers all bytes before and after it."""
CODEC_DATA_NBYTES = CHECKSUM_AT - _FIELDS.size
"""Bytes of the header that codecs may use."""


class FrameHeader(NamedTuple):
    """The fields in the header of a frame. A tuple, since one is made for every moved block.

    Attributes:
        valid_tokens: leading tokens of the block that are filled.
        payload_nbytes: bytes of the payload as it is stored, encoded or not.
        fingerprint: the fingerprint of the decoded payload's layout.
        key: store key.
        flags: the codecs of the payload; 0: it is not encoded.
        codec_data: what the codecs need to decode it, at most `CODEC_DATA_NBYTES`.
    """

    valid_tokens: int
    payload_nbytes: int
    fingerprint: bytes
    key: BlockKey
    flags: int = 0
    codec_data: bytes = b""


def frame_nbytes(payload_nbytes: int) -> int:
    """Returns the bytes of a frame with such a payload: a multiple of 4096, as direct I/O needs."""
    return -(-(HEADER_NBYTES + payload_nbytes) // ALIGNMENT) * ALIGNMENT


def payload(frame: Tensor, payload_nbytes: int) -> Tensor:
    """Returns the payload of a frame buffer, as a view."""
    return frame[HEADER_NBYTES : HEADER_NBYTES + payload_nbytes]


def fields(header: FrameHeader) -> bytes:
    """Encodes `header` as the beginning of a frame, without codec data and checksum."""
    return _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        header.flags,
        header.valid_tokens,
        header.payload_nbytes,
        header.fingerprint,
        header.key,
    )


class FrameChecksum:
    """The checksum of the frame in a buffer, taken while its bytes pass through a core's cache.

    The code that fills or reads the buffer reports the bytes that it has just touched. They are
    hashed at once, on the same thread, which costs a fraction of a separate pass. Unreported bytes
    are hashed at the end. For one thread at a time.

    Args:
        buffer: 1-D contiguous uint8 host tensor that begins with the frame.

    Attributes:
        array: `buffer` as a NumPy array, made once since that takes microseconds.
    """

    __slots__ = ("_digest", "_done", "_end", "_state", "_view", "array")

    def __init__(self, buffer: Tensor) -> None:
        self.array: NDArray[np.uint8] = buffer.numpy()
        self._view = self.array.data
        self._state = xxhash.xxh3_128()
        self._digest: bytes | None = None
        self._done = self._end = 0

    def passed(self, start: int, stop: int) -> None:
        """Reports that bytes `start` to `stop` of the frame are final.

        Reports come in order, and from 0 again if the frame is written once more. Bytes that do not
        follow the last report are hashed at the end.
        """
        if start == 0:
            self._begin(stop)
            start = self._done
        stop = min(stop, self._end)
        if start == self._done < stop:
            self._state.update(self._view[start:stop])
            self._done = stop

    def end_of(self, start: memoryview) -> int | None:
        """Returns the end of the frame that begins with `start`; ``None`` without a header."""
        if len(start) < HEADER_NBYTES:
            return None
        return min(HEADER_NBYTES + int(_FIELDS.unpack_from(start)[4]), len(self._view))

    def hashed(self, stop: int, digest: bytes) -> None:
        """Reports that the frame is final up to `stop`; `digest` was computed elsewhere."""
        self._done = self._end = stop
        self._digest = digest

    @property
    def encoded(self) -> bool:
        """Returns whether its header, already reported, says that the frame is encoded."""
        return bool(self._view[_FLAGS] != _NOT_ENCODED)

    @property
    def left_nbytes(self) -> int:
        """The most bytes that `digest` still has to hash."""
        return (self._end or len(self._view)) - self._done

    def digest(self) -> bytes:
        """Returns the checksum of the frame; reads the bytes that are not hashed yet."""
        self.passed(self._done, len(self._view))
        return self._digest or self._state.digest()

    def seal(self) -> None:
        """Writes the checksum into a header that `address` has written."""
        self._view[CHECKSUM_AT:HEADER_NBYTES] = self.digest()

    def _begin(self, stop: int) -> None:
        self._digest = None
        self._done = self._end = 0
        end = self.end_of(self._view[:stop])
        if end is not None:
            self._state = xxhash.xxh3_128(self._view[:CHECKSUM_AT])
            self._end = end
            self._done = HEADER_NBYTES


def address(frame: Tensor, header: FrameHeader) -> FrameChecksum:
    """Writes header and padding, without checksum, around the payload that is in `frame` already.

    `frame` is a 1-D contiguous uint8 host tensor of `frame_nbytes(header.payload_nbytes)`.
    Everything but the payload is overwritten. The frame is valid only after `seal` of the returned
    checksum. Thread-safe for different frames.
    """
    need = frame_nbytes(header.payload_nbytes)
    if frame.numel() != need:
        raise ConfigurationError(f"frame: {frame.numel()} bytes, {need} are needed")
    checksum = FrameChecksum(frame)
    view = checksum.array.data
    view[:HEADER_NBYTES] = (fields(header) + header.codec_data).ljust(HEADER_NBYTES, b"\0")
    end = HEADER_NBYTES + header.payload_nbytes
    view[end:] = bytes(need - end)
    return checksum


def seal(frame: Tensor, header: FrameHeader) -> None:
    """Writes header, checksum and padding: `address`, and one pass over the payload (12 GB/s)."""
    address(frame, header).seal()


def check(
    frame: Tensor,
    key: BlockKey,
    fingerprints: Collection[bytes] | None,
    taken: FrameChecksum | None = None,
) -> FrameHeader:
    """Checks a frame of `key` in one of the layouts `fingerprints` (``None``: any).

    Returns its header. Reads the payload, except the bytes that the checksum `taken` of the same
    buffer has hashed already. Changes nothing; thread-safe.

    Raises:
        BadFrame: the frame is damaged, cut short, or has another key, layout or format version.
    """
    view = (frame.numpy() if taken is None else taken.array[: frame.numel()]).data
    header = _read_fitting(view)
    if view[CHECKSUM_AT:HEADER_NBYTES] != (taken or FrameChecksum(frame)).digest():
        raise BadFrame("checksum mismatch")
    return _of(header, key, fingerprints)


def check_header(
    frame: Tensor, key: BlockKey, fingerprints: Collection[bytes] | None
) -> FrameHeader:
    """Checks a frame like `check`, but not its checksum, which the caller has verified."""
    return _of(_read_fitting(frame.numpy().data), key, fingerprints)


def is_encoded(buffer: Tensor) -> bool:
    """Returns whether the header at the beginning of `buffer` is flagged as encoded.

    No other check.
    """
    try:
        return _read(buffer.numpy().data).flags != 0
    except BadFrame:
        return False


def whole(buffer: Tensor) -> Tensor:
    """Returns the frame in `buffer`: the whole buffer, or an encoded frame at its beginning.

    The length of an encoded frame is in its header. No other field is checked.

    Raises:
        BadFrame: the buffer is shorter than the frame, or an encoded frame has no valid header.
    """
    view = buffer.numpy().data
    if view[_FLAGS] == _NOT_ENCODED:
        return buffer
    header = _read(view)
    nbytes = frame_nbytes(header.payload_nbytes)
    if nbytes > buffer.numel():
        raise BadFrame(f"{header.payload_nbytes} bytes of payload, in {buffer.numel()} bytes")
    return buffer[:nbytes]


def _read(view: memoryview) -> FrameHeader:
    if len(view) < HEADER_NBYTES:
        raise BadFrame(f"{len(view)} bytes cannot hold a header of {HEADER_NBYTES}")
    magic, version, flags, tokens, nbytes, fingerprint, key = _FIELDS.unpack_from(view)
    if magic != _MAGIC:
        raise BadFrame("not a frame: wrong magic number")
    if version != FORMAT_VERSION:
        raise BadFrame(f"format version {version}, this is {FORMAT_VERSION}")
    codec_data = bytes(view[_FIELDS.size : CHECKSUM_AT]) if flags else b""
    return FrameHeader(tokens, nbytes, fingerprint, BlockKey(key), flags, codec_data)


def _read_fitting(view: memoryview) -> FrameHeader:
    header = _read(view)
    nbytes = header.payload_nbytes
    if frame_nbytes(nbytes) != len(view):
        raise BadFrame(f"{nbytes} bytes of payload do not fit a frame of {len(view)}")
    return header


def _of(header: FrameHeader, key: BlockKey, fingerprints: Collection[bytes] | None) -> FrameHeader:
    if header.key != key:
        raise BadFrame(f"holds block {header.key.hex()[:16]}, not {key.hex()[:16]}")
    if fingerprints is not None and header.fingerprint not in fingerprints:
        raise BadFrame("of another layout")
    return header
