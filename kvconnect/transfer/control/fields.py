"""The types of message fields, and the largest size of each.

Block ids travel as packed int32: a byte string cannot claim more elements than it has.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

MAX_ENTRIES = 1024
"""The most leases in one `Renew`; longer lists of anything but block ids are refused."""

_LETTERS = {"int32": ("i", 4), "uint64": ("Q", 8)}


def unpacked(kind: Literal["int32", "uint64"]) -> BeforeValidator:
    """Returns a validator that turns the little-endian bytes of an array of `kind` into a tuple."""
    letter, size = _LETTERS[kind]

    def numbers_of(value: object) -> object:
        if not isinstance(value, bytes):
            return value
        if len(value) % size:
            raise ValueError(f"{len(value)} bytes are no {kind} array")
        return struct.unpack(f"<{len(value) // size}{letter}", value)

    return BeforeValidator(numbers_of)


def packed(kind: Literal["int32", "uint64"]) -> PlainSerializer:
    """Returns a serializer that turns a tuple into the bytes that `unpacked` accepts."""
    letter, _ = _LETTERS[kind]
    return PlainSerializer(lambda numbers: struct.pack(f"<{len(numbers)}{letter}", *numbers))


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Digest = Annotated[int, Field(ge=0, lt=1 << 64)]
Number32 = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Text = Annotated[str, Field(max_length=1024)]
BlockIds = Annotated[tuple[Number32, ...], unpacked("int32"), packed("int32")]
Groups = Annotated[tuple[BlockIds, ...], Field(max_length=64)]


class Record(BaseModel):
    """An immutable record whose fields have exactly these types; unknown fields are refused."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", hide_input_in_errors=True, ser_json_inf_nan="null"
    )
