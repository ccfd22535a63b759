"""The MessagePack encoding of the channel."""

from __future__ import annotations

from kvconnect.errors import BadMessage, MissingExtra
from kvconnect.transfer.control.fields import MAX_ENTRIES

try:
    import msgpack
except ModuleNotFoundError as missing:
    raise MissingExtra("the control channel of transfers", "transfer") from missing

__all__ = ["pack", "unpack"]


def pack(value: object) -> bytes:
    """Returns the bytes of `value`: numbers, text, bytes, and arrays and maps of those."""
    data: bytes = msgpack.packb(value)
    return data


def unpack(data: bytes) -> object:
    """Returns the value whose bytes are `data`, which may be anything. Arrays are tuples.

    Raises:
        BadMessage: it is none, or an array or a map of it is longer than `MAX_ENTRIES`.
    """
    try:
        value: object = msgpack.unpackb(
            data,
            use_list=False,
            max_array_len=MAX_ENTRIES,
            max_map_len=MAX_ENTRIES,
            max_ext_len=0,
        )
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"no MessagePack: {type(error).__name__}") from error
    return value
