"""The messages of the control channel, and their bytes.

A message is ``[code, {field: value}]`` in MessagePack. A received message is checked completely
before the caller gets it: codes, names, types, ranges, lengths.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from kvconnect.errors import BadMessage, ConfigurationError, MissingExtra
from kvconnect.transfer.control.description import Compat, PoolInfo
from kvconnect.transfer.control.fields import (
    MAX_ENTRIES,
    Count,
    Digest,
    Groups,
    Name,
    Number32,
    Record,
    Seconds,
    Text,
    packed,
    unpacked,
)

try:
    import msgpack
except ModuleNotFoundError as missing:
    raise MissingExtra("the control channel of transfers", "transfer") from missing

MAX_MESSAGE_NBYTES = 8 << 20
"""The largest message, encoded."""

MAX_PIECES = 1 << 16
"""The most pieces under one digest."""


class Message(Record):
    """A message of one side to the other. Only subclasses with a `code` are sent."""

    code: ClassVar[int]

    @classmethod
    def __pydantic_init_subclass__(cls, **keywords: Any) -> None:
        super().__pydantic_init_subclass__(**keywords)
        _BY_CODE[cls.code] = cls


_BY_CODE: dict[int, type[Message]] = {}


class LeaseId(Record):
    """The name of a lease. No two leases have the same epoch, not even of two incarnations of P."""

    request: Name
    epoch: Count


class Watermark(Record):
    """The part of a request that is computed. Of two watermarks, the lesser was sent first.

    Attributes:
        layers: how many leading layers hold the first `tokens` tokens.
        tokens: the request's tokens up to the end of the chunk that is being computed.
        before: the tokens before that chunk, which all layers hold. An earlier watermark stays
            true.
        kept: whether the whole request is computed, and its blocks stay while the lease holds. If
            False, the blocks may still be reused, and bytes read of them are not valid yet.
    """

    layers: Number32
    tokens: Number32
    before: Number32 = 0
    kept: bool = False

    def __lt__(self, other: Watermark) -> bool:
        """Compares `tokens` first, then `layers`, `before` and `kept`."""
        return self._order() < other._order()

    def _order(self) -> tuple[int, int, int, bool]:
        return self.tokens, self.layers, self.before, self.kept

    def after(self, earlier: Watermark) -> Watermark:
        """Returns a copy of this watermark whose `before` includes what `earlier` implies.

        Once a later chunk is computed, every layer holds the one before. For `tokens_of` only: a
        greater `before` hides a later ``kept`` in the order.
        """
        grew = self.tokens > earlier.tokens
        before = max(earlier.tokens, self.before) if grew else earlier.before
        return self.model_copy(update={"before": before})

    def tokens_of(self, layer: int) -> int:
        """Returns how many leading tokens layer number `layer` of the model holds."""
        return self.tokens if layer < self.layers else self.before


NOTHING_COMPUTED = Watermark(layers=0, tokens=0)
"""The watermark of a request before its first token."""


class Proof(Message):
    """The sender's proof that it knows the shared secret. Part of the opening only."""

    code: ClassVar[int] = 1

    mac: Annotated[bytes, Field(min_length=32, max_length=32, repr=False)]


class Hello(Message):
    """The identity of the sender, and how its memory is read. Part of the opening only.

    Attributes:
        compat: the properties that must be equal on both sides.
        engine_id: the name of the instance, the same after a restart.
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
    """The sender's reason for closing the connection.

    Attributes:
        field: what differs or is wrong, for example ``dtype`` or ``secret``; may be empty.
    """

    code: ClassVar[int] = 3

    kind: Literal["refused", "closing"]
    field: Text = ""
    message: Text = ""


class Ping(Message):
    """A heartbeat, to be answered with a `Pong` of the same number."""

    code: ClassVar[int] = 4

    number: Count


class Pong(Message):
    """Answers a `Ping`."""

    code: ClassVar[int] = 5

    number: Count


class _OfLease(Record):
    """The fields of the messages about one lease."""

    seq: Count
    request: Name
    epoch: Count


class Claim(Message):
    """Claims a request's blocks for D. Sent again, it is answered again.

    Attributes:
        seq: grows with each `Claim` and `Renew` of a sender; the answer repeats it.
        epoch: ``None`` means the newest lease. P then waits a while if the request is not
            published yet.
        readers: the number of holders that will claim; P unpins the blocks when all have released.
    """

    code: ClassVar[int] = 11

    seq: Count
    request: Name
    epoch: Count | None = None
    readers: Annotated[int, Field(ge=1, le=4096)] = 1


class Grant(Message, _OfLease):
    """Answers a `Claim`: the blocks stay for `lease_s` seconds from when this was sent."""

    code: ClassVar[int] = 12

    lease_s: Seconds
    tokens: Number32
    blocks: Groups
    watermark: Watermark


class Expired(Message, _OfLease):
    """Answers a `Claim` or `Release`: the lease existed, and it was broken."""

    code: ClassVar[int] = 13


class Unknown(Message):
    """Answers a `Claim` or `Release`: P remembers no such lease."""

    code: ClassVar[int] = 14

    seq: Count
    request: Name
    epoch: Count | None = None


class WatermarkOf(Message, LeaseId):
    """Reports to D that P has computed more of a request that D holds.

    Attributes:
        first: for each pool group, the index in the request of the first of `blocks`; empty if no
            block is new.
        blocks: ids of the blocks that follow, for each pool group.
    """

    code: ClassVar[int] = 15

    watermark: Watermark
    first: Annotated[tuple[Number32, ...], Field(max_length=64)] = ()
    blocks: Groups = ()


class Renew(Message):
    """Renews leases that D still needs."""

    code: ClassVar[int] = 16

    seq: Count
    leases: Annotated[tuple[LeaseId, ...], Field(max_length=MAX_ENTRIES)]


class RenewedLease(LeaseId):
    """A lease in a `Renewed`. It repeats the watermark, in case an earlier message was lost."""

    lease_s: Seconds
    watermark: Watermark


class Renewed(Message):
    """Answers a `Renew`: the leases that are extended, and those that are not."""

    code: ClassVar[int] = 17

    seq: Count
    leases: Annotated[tuple[RenewedLease, ...], Field(max_length=MAX_ENTRIES)] = ()
    expired: Annotated[tuple[LeaseId, ...], Field(max_length=MAX_ENTRIES)] = ()
    unknown: Annotated[tuple[LeaseId, ...], Field(max_length=MAX_ENTRIES)] = ()


class Release(Message, _OfLease):
    """Reports to P that D's last read under the lease has ended."""

    code: ClassVar[int] = 18


class ReleasedOk(Message, _OfLease):
    """Answers a `Release`: the lease was never broken, so all reads under it are valid."""

    code: ClassVar[int] = 19


class Abort(Message):
    """Ends a request for its sender.

    From D: D no longer wants the blocks, and discards the bytes that it read. From P: P computes no
    more of the request; granted blocks stay until the lease ends.
    """

    code: ClassVar[int] = 20

    request: Name
    epoch: Count | None = None
    reason: Text = ""


class FindDigest(Message):
    """Requests the digest of pieces of P's memory that D has read under a lease. Sent by D.

    Attributes:
        seq: the answer repeats it.
        region: number of the memory at P's transport.
        nbytes: the size of each piece.
        offsets: the offsets of the pieces in the memory, in bytes.
    """

    code: ClassVar[int] = 21

    seq: Count
    region: Number32
    nbytes: Annotated[int, Field(ge=1, lt=1 << 48)]
    offsets: Annotated[
        tuple[Count, ...],
        Field(min_length=1, max_length=MAX_PIECES),
        unpacked("uint64"),
        packed("uint64"),
    ]


class FoundDigest(Message):
    """Answers a `FindDigest` with the xxh3-64 of the pieces; ``None`` if P computes no digest."""

    code: ClassVar[int] = 22

    seq: Count
    digest: Digest | None = None


def encode(message: Message) -> bytes:
    """Returns the bytes of `message`, without its length.

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
    """Returns the message whose bytes are `data`, which is not trusted.

    Raises:
        BadMessage: `data` is not a message. The error names the wrong field, never its value.
    """
    try:
        said: object = msgpack.unpackb(
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
