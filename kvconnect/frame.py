"""The frame around every stored block: a header that binds the bytes to their key.

``header (128 bytes) | payload | zeros up to a multiple of 4096``. The checksum covers header and
payload, and the header holds the store key: a right block under a wrong key fails like a damaged
one.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

import xxhash
from torch import Tensor

from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.keys import FORMAT_VERSION, BlockKey

__all__ = ["ALIGNMENT", "HEADER_NBYTES", "FrameHeader", "check", "frame_nbytes", "payload", "seal"]

HEADER_NBYTES = 128
ALIGNMENT = 4096
_MAGIC = b"KVCFRAME"
# magic, version, flags, valid tokens, payload length, layout fingerprint, store key
_FIELDS = struct.Struct("<8sHHIQ16s32s")
_CHECKSUM_AT = HEADER_NBYTES - 16


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a sound frame says of itself."""

    valid_tokens: int
    payload_nbytes: int
    fingerprint: bytes
    key: BlockKey
    flags: int = 0


def frame_nbytes(payload_nbytes: int) -> int:
    """Bytes of the frame of so large a payload: a multiple of 4096, to go to disk as it is."""
    return -(-(HEADER_NBYTES + payload_nbytes) // ALIGNMENT) * ALIGNMENT


def payload(frame: Tensor, payload_nbytes: int) -> Tensor:
    """The payload of a frame buffer, as a view."""
    return frame[HEADER_NBYTES : HEADER_NBYTES + payload_nbytes]


def seal(frame: Tensor, header: FrameHeader) -> None:
    """Write header, checksum and padding around the payload that is in `frame` already.

    `frame` is a 1-D contiguous uint8 host tensor of `frame_nbytes(header.payload_nbytes)`.
    Everything but its payload is overwritten. Reads the whole payload (12 GB/s); thread-safe for
    different frames.
    """
    need = frame_nbytes(header.payload_nbytes)
    if frame.numel() != need:
        raise ConfigurationError(f"frame: {frame.numel()} bytes, {need} are needed")
    fields = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        header.flags,
        header.valid_tokens,
        header.payload_nbytes,
        header.fingerprint,
        header.key,
    )
    view = frame.numpy().data
    view[:_CHECKSUM_AT] = fields.ljust(_CHECKSUM_AT, b"\0")
    end = HEADER_NBYTES + header.payload_nbytes
    view[end:] = bytes(need - end)
    view[_CHECKSUM_AT:HEADER_NBYTES] = _checksum(view, end)


def check(frame: Tensor, key: BlockKey, fingerprints: Collection[bytes] | None) -> FrameHeader:
    """The header of a sound frame of `key`, in one of the layouts `fingerprints` (``None``: any).

    Reads the whole payload; changes nothing; thread-safe.

    Raises:
        BadFrame: damaged, cut short, of another key, layout or format version.
    """
    view = frame.numpy().data
    if len(view) < HEADER_NBYTES:
        raise BadFrame(f"{len(view)} bytes cannot hold a header of {HEADER_NBYTES}")
    magic, version, flags, tokens, nbytes, fingerprint, found = _FIELDS.unpack_from(view)
    if magic != _MAGIC:
        raise BadFrame("not a frame: wrong magic number")
    if version != FORMAT_VERSION:
        raise BadFrame(f"format version {version}, this is {FORMAT_VERSION}")
    end = HEADER_NBYTES + nbytes
    if frame_nbytes(nbytes) != len(view):
        raise BadFrame(f"{nbytes} bytes of payload do not fit a frame of {len(view)}")
    if view[_CHECKSUM_AT:HEADER_NBYTES] != _checksum(view, end):
        raise BadFrame("checksum mismatch")
    if found != key:
        raise BadFrame(f"holds block {found.hex()[:16]}, not {key.hex()[:16]}")
    if fingerprints is not None and fingerprint not in fingerprints:
        raise BadFrame("of another layout")
    return FrameHeader(tokens, nbytes, fingerprint, BlockKey(found), flags)


def _checksum(view: memoryview, end: int) -> bytes:
    state = xxhash.xxh3_128(view[:_CHECKSUM_AT])
    state.update(view[HEADER_NBYTES:end])
    return state.digest()
