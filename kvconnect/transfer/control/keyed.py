"""The messages of peers that read each other's blocks by key.

A process that never imports this module refuses these messages as unknown.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from kvconnect.keys import KEY_NBYTES
from kvconnect.transfer.control.fields import (
    BlockIds,
    Count,
    Digest,
    Name,
    Number32,
    Seconds,
    packed,
    unpacked,
)
from kvconnect.transfer.control.messages import Message

MAX_KEYS = 8192
"""The most keys in one message."""

MAX_TOKENS = 1 << 16
"""The most token ids in one message."""

SAMPLE_EVERY = 16
"""With ``verify="sample"``, one of so many blocks has a digest, beginning with the first."""

Verify: TypeAlias = Literal["full", "sample", "none"]
"""The blocks whose xxh3 a grant contains: all, every `SAMPLE_EVERY`-th, or none."""


def digested(verify: Verify, blocks: int) -> range:
    """Returns the indices of those of `blocks` blocks that have a digest."""
    step = {"full": 1, "sample": SAMPLE_EVERY}.get(verify)
    return range(0) if step is None else range(0, blocks, step)


def _keys_of(value: object) -> object:
    if not isinstance(value, bytes):
        return value
    if len(value) % KEY_NBYTES:
        raise ValueError(f"{len(value)} bytes are no keys of {KEY_NBYTES}")
    return tuple(value[at : at + KEY_NBYTES] for at in range(0, len(value), KEY_NBYTES))


Key = Annotated[bytes, Field(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
Keys = Annotated[
    tuple[Key, ...],
    Field(max_length=MAX_KEYS),
    BeforeValidator(_keys_of),
    PlainSerializer(b"".join, return_type=bytes),
]
Size = Annotated[int, Field(ge=0, lt=1 << 48)]
Sizes = Annotated[
    tuple[Size, ...], Field(max_length=MAX_KEYS), unpacked("uint64"), packed("uint64")
]
Digests = Annotated[
    tuple[Digest, ...], Field(max_length=MAX_KEYS), unpacked("uint64"), packed("uint64")
]


class FindKeys(Message):
    """Asks which of `keys` the receiver has."""

    code: ClassVar[int] = 30

    seq: Count
    keys: Keys


class FoundKeys(Message):
    """Answers a `FindKeys`: one byte for each of its keys, 1 if it is there now."""

    code: ClassVar[int] = 31

    seq: Count
    found: Annotated[bytes, Field(max_length=MAX_KEYS)]


class ClaimKeys(Message):
    """Claims the blocks of `keys` for D. Each such message makes another lease.

    Attributes:
        seq: as in `Claim`.
        request: a name that no other claim of any process has.
        verify: the blocks whose digests the grant should contain.
    """

    code: ClassVar[int] = 32

    seq: Count
    request: Name
    keys: Keys
    verify: Verify = "none"


class GrantKeys(Message):
    """Answers a `ClaimKeys`: the leading blocks that exist, which stay for `lease_s` seconds.

    If there is none, the answer is `Unknown`.

    Attributes:
        region: number of their memory at the sender's transport.
        unit: bytes of one unit of that memory; a block's last unit may be used in part.
        sizes: bytes of each block.
        units: the units' numbers in the memory, one block's after the other's.
        digests: xxh3-64 of those blocks that `digested` names, in order.
    """

    code: ClassVar[int] = 33

    seq: Count
    request: Name
    epoch: Count
    lease_s: Seconds
    region: Number32
    unit: Annotated[int, Field(ge=1, lt=1 << 48)]
    sizes: Sizes
    units: BlockIds
    digests: Digests = ()

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        needed = sum(-(-size // self.unit) for size in self.sizes)
        if needed != len(self.units):
            raise ValueError(f"units: {len(self.units)}, and the sizes take {needed}")
        return self


class FindChildren(Message):
    """Asks for the blocks with known tokens that follow `parent`.

    With ``None`` it asks for those that begin a prompt.
    """

    code: ClassVar[int] = 36

    seq: Count
    parent: Key | None


class FoundChildren(Message):
    """Answers a `FindChildren`. If there are very many children, only the newest are named.

    Attributes:
        keys: the key of each child.
        lengths: the number of tokens of each child.
        tokens: the token ids of all children, one block's after the other's, int32 little-endian.
    """

    code: ClassVar[int] = 37

    seq: Count
    keys: Keys
    lengths: Sizes
    tokens: Annotated[bytes, Field(max_length=4 * MAX_TOKENS)]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if len(self.lengths) != len(self.keys):
            raise ValueError(f"lengths: {len(self.lengths)}, and there are {len(self.keys)} keys")
        if 4 * sum(self.lengths) != len(self.tokens):
            raise ValueError(f"tokens: {len(self.tokens)} bytes do not fit the lengths")
        return self


class ForgetKeys(Message):
    """Asks the receiver to delete the blocks of `keys`, which are wrong or no longer wanted."""

    code: ClassVar[int] = 34

    seq: Count
    keys: Keys


class ForgotKeys(Message):
    """Answers a `ForgetKeys`: the blocks are deleted."""

    code: ClassVar[int] = 35

    seq: Count
