"""The messages of the control channel, and their bytes.

A message is ``[code, {field: value}]`` in MessagePack. What comes in is checked whole before
anybody sees it: codes, names, types, ranges, lengths. Block ids travel as packed int32: a byte
string cannot claim more elements than it has.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from kvconnect.errors import BadMessage, ConfigurationError, MissingExtra
from kvconnect.layout import KvCacheLayout

if TYPE_CHECKING:
    import torch

try:
    import msgpack
except ModuleNotFoundError as missing:
    raise MissingExtra("the control channel of transfers", "transfer") from missing

__all__ = [
    "MAX_ENTRIES",
    "MAX_MESSAGE_NBYTES",
    "PROTOCOL",
    "Abort",
    "Claim",
    "Compat",
    "Error",
    "Expired",
    "Grant",
    "Hello",
    "LeaseId",
    "Message",
    "Offer",
    "Ping",
    "Pong",
    "PoolInfo",
    "Proof",
    "Record",
    "Release",
    "ReleasedOk",
    "Renew",
    "Renewed",
    "RenewedLease",
    "Unknown",
    "Watermark",
    "WatermarkOf",
    "decode",
    "encode",
]

PROTOCOL = 1
"""Version of what is said here and how; peers of another one are refused."""

MAX_MESSAGE_NBYTES = 8 << 20
"""The largest message, encoded."""

MAX_ENTRIES = 1024
"""The most leases in one `Renew`; longer lists of anything but block ids are refused."""


def _ids_of(value: object) -> object:
    if not isinstance(value, bytes):
        return value
    if len(value) % 4:
        raise ValueError(f"{len(value)} bytes are no int32 array")
    return struct.unpack(f"<{len(value) // 4}i", value)


def _packed(ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Number32 = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Text = Annotated[str, Field(max_length=1024)]
BlockIds = Annotated[tuple[Number32, ...], BeforeValidator(_ids_of), PlainSerializer(_packed)]
Groups = Annotated[tuple[BlockIds, ...], Field(max_length=64)]


class Record(BaseModel):
    """Immutable fields of exactly these types; unknown ones are refused."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", hide_input_in_errors=True, ser_json_inf_nan="null"
    )


class Message(Record):
    """Something that one side says to the other; subclasses with a `code` travel."""

    code: ClassVar[int]


class Compat(Record):
    """What must be equal on both sides, or their blocks mean different things.

    Attributes:
        model: what tells configuration and weights: their digest, or id and revision.
        dtype: of keys and values in the pool.
        num_layers, num_kv_heads, key_dim, value_dim: of the whole model, all ranks together.
        block_format: version of how a block is laid out in memory.
        transport: the name of the transport that blocks travel by.
    """

    model: Name
    dtype: Name
    num_layers: Number32
    num_kv_heads: Number32
    key_dim: Number32
    value_dim: Number32
    block_format: Number32
    transport: Name

    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever any field, or the protocol, does."""
        said = msgpack.packb([PROTOCOL, self.model_dump()])
        return hashlib.blake2b(said, digest_size=16).digest()


class PoolInfo(Record):
    """A pool group's memory on the side that says it, for reading from there.

    Attributes:
        region: its number at that side's transport.
        num_blocks: block ids are below it.
        num_layers, num_kv_heads, key_dim, value_dim, tokens_per_block, dtype, window, layers: of
            this rank's blocks, as in `KvCacheLayout`.
    """

    region: Number32
    num_blocks: Number32
    num_layers: Number32
    num_kv_heads: Number32
    key_dim: Number32
    value_dim: Number32
    tokens_per_block: Number32
    dtype: Name
    window: Number32 | None = None
    layers: Annotated[tuple[Number32, ...], Field(max_length=MAX_ENTRIES)] = ()

    @classmethod
    def of(cls, region: int, num_blocks: int, layout: KvCacheLayout) -> Self:
        """The pool of `num_blocks` blocks of `layout` that is registered as `region`."""
        return cls(
            region=region,
            num_blocks=num_blocks,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            key_dim=layout.key_dim,
            value_dim=layout.value_dim,
            tokens_per_block=layout.tokens_per_block,
            dtype=str(layout.dtype).removeprefix("torch."),
            window=layout.window,
            layers=layout.layers,
        )

    def layout(self) -> KvCacheLayout:
        """The layout of its blocks.

        Raises:
            ConfigurationError: there is none like that; names the field.
        """
        import torch

        dtype: torch.dtype | None = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigurationError(f"dtype: '{self.dtype}' of a peer's pool is unknown here")
        return KvCacheLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            tokens_per_block=self.tokens_per_block,
            dtype=dtype,
            window=self.window,
            layers=self.layers,
        )


class LeaseId(Record):
    """Which lease: an epoch is used once by all incarnations of a P together."""

    request: Name
    epoch: Count


class Watermark(Record):
    """How much of a request is computed: its first `layers` layers hold its first `tokens` tokens.

    What an earlier one said stays true: the layers above hold what they held.
    """

    layers: Number32
    tokens: Number32


class Proof(Message):
    """Opening only: that the sender knows the shared secret."""

    code: ClassVar[int] = 1

    mac: Annotated[bytes, Field(min_length=32, max_length=32, repr=False)]


class Hello(Message):
    """Opening only: who the sender is, and how its memory is read.

    Attributes:
        compat: must be equal on both sides.
        engine_id: of the instance, the same after a restart.
        boot: 16 bytes, another for each start of the process.
        rank, tp_size: which part of the KV heads this process has.
        local: what the transport's `local` returned; opaque here.
        pools: one for each pool group, in their order.
    """

    code: ClassVar[int] = 2

    compat: Compat
    engine_id: Name
    boot: Annotated[bytes, Field(min_length=16, max_length=16)]
    rank: Number32 = 0
    tp_size: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    local: Annotated[bytes, Field(max_length=1 << 20, repr=False)] = b""
    pools: Annotated[tuple[PoolInfo, ...], Field(max_length=64)] = ()

    @property
    def holder(self) -> str:
        """The sender's name in leases: one incarnation of one rank."""
        return f"{self.engine_id}/{self.rank}/{self.boot.hex()}"


class Error(Message):
    """The sender ends the connection, and why.

    Attributes:
        field: what differs or is wrong, for example ``dtype`` or ``secret``; may be empty.
    """

    code: ClassVar[int] = 3

    kind: Literal["refused", "busy", "closing"]
    field: Text = ""
    message: Text = ""


class Ping(Message):
    """A sign of life, to be answered with a `Pong` of the same number."""

    code: ClassVar[int] = 4

    number: Count


class Pong(Message):
    """Answers a `Ping`."""

    code: ClassVar[int] = 5

    number: Count


class Offer(Message):
    """P has pinned blocks of a request that it computes, for `lease_s` seconds.

    Attributes:
        tokens: of the prompt.
        blocks: ids for each pool group, as far as they are allocated.
        watermark: what they hold now.
    """

    code: ClassVar[int] = 10

    request: Name
    epoch: Count
    lease_s: Seconds
    tokens: Number32
    blocks: Groups
    watermark: Watermark


class Claim(Message):
    """D wants to read a request's blocks. Sent again, it is answered again.

    Attributes:
        seq: grows with each `Claim` and `Renew` of a sender; the answer repeats it.
        epoch: ``None``: the newest; P waits a while for an offer that is still to come.
        readers: so many holders will claim; P lets go of the blocks when all have released.
    """

    code: ClassVar[int] = 11

    seq: Count
    request: Name
    epoch: Count | None = None
    readers: Annotated[int, Field(ge=1, le=4096)] = 1


class Grant(Message):
    """Answers a `Claim`: the blocks stay for `lease_s` seconds from when this was written."""

    code: ClassVar[int] = 12

    seq: Count
    request: Name
    epoch: Count
    lease_s: Seconds
    tokens: Number32
    blocks: Groups
    watermark: Watermark


class Expired(Message):
    """Answers a `Claim` or `Release`: there was such a lease, and it was broken."""

    code: ClassVar[int] = 13

    seq: Count
    request: Name
    epoch: Count


class Unknown(Message):
    """Answers a `Claim` or `Release`: there is no such lease, for all that P remembers."""

    code: ClassVar[int] = 14

    seq: Count
    request: Name
    epoch: Count | None = None


class WatermarkOf(Message):
    """P has computed more of a request that D holds.

    Attributes:
        first: for each pool group, the index in the request of the first of `blocks`; empty: no
            block is new.
        blocks: ids of the blocks that follow, for each pool group.
    """

    code: ClassVar[int] = 15

    request: Name
    epoch: Count
    watermark: Watermark
    first: Annotated[tuple[Number32, ...], Field(max_length=64)] = ()
    blocks: Groups = ()


class Renew(Message):
    """D still needs these leases."""

    code: ClassVar[int] = 16

    seq: Count
    leases: Annotated[tuple[LeaseId, ...], Field(max_length=MAX_ENTRIES)]


class RenewedLease(Record):
    """One lease of `Renewed`; repeats the watermark, so that a lost one is late, not missing."""

    request: Name
    epoch: Count
    lease_s: Seconds
    watermark: Watermark


class Renewed(Message):
    """Answers a `Renew`: which leases go on, and which do not."""

    code: ClassVar[int] = 17

    seq: Count
    leases: Annotated[tuple[RenewedLease, ...], Field(max_length=MAX_ENTRIES)] = ()
    expired: Annotated[tuple[LeaseId, ...], Field(max_length=MAX_ENTRIES)] = ()
    unknown: Annotated[tuple[LeaseId, ...], Field(max_length=MAX_ENTRIES)] = ()


class Release(Message):
    """D's last read of the lease has ended."""

    code: ClassVar[int] = 18

    seq: Count
    request: Name
    epoch: Count


class ReleasedOk(Message):
    """Answers a `Release`: the lease was never broken, all that was read under it is valid."""

    code: ClassVar[int] = 19

    seq: Count
    request: Name
    epoch: Count


class Abort(Message):
    """D: does not want the blocks any more, and takes nothing it read for valid.

    P: computes no more of the request; what it granted stays until the lease ends.
    """

    code: ClassVar[int] = 20

    request: Name
    epoch: Count | None = None
    reason: Text = ""


_BY_CODE: dict[int, type[Message]] = {one.code: one for one in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """The bytes of `message`, without its length.

    Raises:
        ConfigurationError: they are more than `MAX_MESSAGE_NBYTES`.
    """
    data: bytes = msgpack.packb([message.code, message.model_dump(exclude_defaults=True)])
    if len(data) > MAX_MESSAGE_NBYTES:
        raise ConfigurationError(
            f"{type(message).__name__}: {len(data)} bytes do not fit one message "
            f"of at most {MAX_MESSAGE_NBYTES}"
        )
    return data


def decode(data: bytes) -> Message:
    """The message whose bytes are `data`, which may be anything.

    Raises:
        BadMessage: it is none; tells which field is wrong, never the value.
    """
    try:
        said: Any = msgpack.unpackb(
            data,
            use_list=False,
            max_array_len=MAX_ENTRIES,
            max_map_len=MAX_ENTRIES,
            max_ext_len=0,
        )
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"no MessagePack: {type(error).__name__}") from error
    if not (isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], dict)):
        raise BadMessage("a message is [code, fields]")
    cls = _BY_CODE.get(said[0]) if type(said[0]) is int else None
    if cls is None:
        raise BadMessage("unknown message code")
    try:
        return cls.model_validate(said[1])
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"][:4])
        raise BadMessage(f"{cls.__name__}.{where}: {first['msg'][:100]}") from None
