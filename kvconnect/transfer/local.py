"""The description that a transport sends to its peers, as bytes in their HELLO."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvconnect.errors import PeerUnreachable
from kvconnect.transfer.regions import MAX_REGIONS

MAX_LOCAL_NBYTES = 4 << 20

Size = Annotated[int, Field(ge=1, lt=1 << 62)]


class Local(BaseModel):
    """The fields of every transport's description.

    Attributes:
        identity: the peer's name, the same after a restart.
        incarnation: 32 hexadecimal digits, different for each opening of a transport.
        regions: bytes of each registered memory; the index is the region's number.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )

    version: Literal[1] = 1
    identity: Annotated[str, Field(min_length=1, max_length=256)]
    incarnation: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    regions: Annotated[tuple[Size, ...], Field(max_length=MAX_REGIONS)]


L = TypeVar("L", bound=Local)


def encode(local: Local) -> bytes:
    """Returns the bytes of `local`."""
    return local.model_dump_json().encode()


def decode(kind: type[L], data: bytes) -> L:
    """Returns the description of class `kind` that `encode` made `data` of.

    Raises:
        PeerUnreachable: `data` is too long, of another transport or version, or no description.
    """
    if len(data) > MAX_LOCAL_NBYTES:
        raise PeerUnreachable(
            f"the peer's local() has {len(data)} bytes: {MAX_LOCAL_NBYTES} at most"
        )
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the whole"
        raise PeerUnreachable(f"the peer's local(): {field}: {first['msg']}") from error
