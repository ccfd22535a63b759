"""The commands about one key, their answers, and small commands on one connection."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import hiredis

from kvconnect.backends.redis.format import HEAD_NBYTES, Head
from kvconnect.backends.redis.settings import Address
from kvconnect.backends.redis.wire import Bytes, Reply, Wire
from kvconnect.errors import BackendUnavailable
from kvconnect.frame import FrameChecksum

_ASK_WINDOW = 512
ASKING = b"*1\r\n$6\r\nASKING\r\n"
_GET_HEAD = b"*4\r\n$8\r\nGETRANGE\r\n$%%d\r\n%%s\r\n$1\r\n0\r\n$%d\r\n%d\r\n" % (
    len(str(HEAD_NBYTES - 1)),
    HEAD_NBYTES - 1,
)
_MOST_DIGITS = 5  # the numbers of a slot and of a port
REFUSALS = ("OOM", "MISCONF", "READONLY", "NOREPLICAS")


class Outcome(enum.Enum):
    """The result of a command about one value."""

    DONE = enum.auto()
    ABSENT = enum.auto()
    THERE = enum.auto()
    """A value exists already; it was not replaced."""
    TAKEN = enum.auto()
    """The same, and it was not seen when it was looked for: it came meanwhile, or is empty."""
    UNFIT = enum.auto()
    """The value is longer than the buffer."""
    BROKEN = enum.auto()
    """The value is no block, or a damaged one."""
    NOT_TRIED = enum.auto()


@dataclass(frozen=True, slots=True)
class Redirect:
    """The answer that another server of the cluster has the key.

    Attributes:
        slot: the slot of the key.
        asking: true if only this request goes to the other server, because the slot is being moved.
    """

    slot: int
    address: Address
    asking: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer that the server accepts no writes now.

    Attributes:
        reason: the server's message.
    """

    reason: str
    server: Address


class Ask(NamedTuple):
    """A small command. A tuple: a lookup makes one for every block.

    Attributes:
        name: the key of the command.
        packed: the command as sent.
    """

    name: bytes
    packed: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A value to fetch.

    Attributes:
        into: receives the value's part of the frame. A value with a head may be shorter than
            `into`.
        headed: true if the value begins with a `Head`; otherwise it is exactly as long as `into`.
        checksum: the checksum of the frame that the value begins; hashes the bytes that arrive.
    """

    name: bytes
    into: memoryview
    headed: bool = True
    checksum: FrameChecksum | None = None

    @property
    def nbytes(self) -> int:
        """The most bytes to receive."""
        return len(self.into)


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """A value to store.

    Attributes:
        pieces: the consecutive pieces of the value.
        ttl_ms: milliseconds after which the value expires; ``None``: never.
        replace: true to replace an existing value.
        look_first: true to check first for a block of that name, and to send no value if there is
            one.
        checksum: the checksum of the frame that begins in the value, sealed before it is sent.
    """

    name: bytes
    pieces: tuple[Bytes, ...]
    ttl_ms: int | None = None
    replace: bool = True
    look_first: bool = False
    checksum: FrameChecksum | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the value."""
        return sum(len(piece) for piece in self.pieces)

    def around(self) -> tuple[bytes, bytes]:
        """Returns the bytes of the command before and after the value."""
        options = [] if self.replace else [b"NX"]
        if self.ttl_ms is not None:
            options += [b"PX", b"%d" % self.ttl_ms]
        tail = b"".join(b"\r\n$%d\r\n%s" % (len(word), word) for word in options) + b"\r\n"
        words, length = 3 + len(options), len(self.name)
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n"
        return head % (words, length, self.name, self.nbytes), tail


Fetched: TypeAlias = Head | Outcome | Redirect
Stored: TypeAlias = Refused | Outcome | Redirect


def command(*words: bytes | int | str) -> bytes:
    """Returns the bytes of a command."""
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packed


def about(verb: bytes, name: bytes, *words: bytes | int | str) -> Ask:
    """Returns the small command `verb` about the key `name`."""
    return Ask(name, command(verb, name, *words))


def call(wire: Wire, *words: bytes | int | str) -> Reply:
    """Sends one command and returns its answer, which may be an error. Blocks."""
    wire.send([command(*words)])
    return wire.replies(1)[0]


def sound(reply: Reply) -> Reply:
    """Returns `reply` unless it is an error.

    Raises:
        BackendUnavailable: `reply` is an error.
    """
    if isinstance(reply, hiredis.ReplyError):
        raise BackendUnavailable(f"the server says: {reply}")
    return reply


def of_another_type(reply: Reply) -> bool:
    """Returns whether `reply` is the error that the name has a value of another type."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("WRONGTYPE")


def head_command(name: bytes) -> Ask:
    """Returns the command for the head that `state_of` reads; the value counts as used."""
    return Ask(name, _GET_HEAD % (len(name), name))


def state_of(reply: Reply) -> Head | Outcome:
    """Returns the state of a value by the reply to `head_command`: head, ``ABSENT``, ``BROKEN``.

    Raises:
        BackendUnavailable: `reply` is another error.
    """
    if isinstance(reply, bytes):
        return Head.parse(reply) or (Outcome.BROKEN if reply else Outcome.ABSENT)
    if of_another_type(reply):
        return Outcome.BROKEN
    raise BackendUnavailable(f"the server says {sound(reply)!r} where bytes were due")


def ask(wire: Wire, asks: Sequence[Ask], *, asking: bool = False) -> list[Reply | Redirect]:
    """Returns the answers to `asks`; errors are answers. Blocks."""
    found: list[Reply | Redirect] = []
    for start in range(0, len(asks), _ASK_WINDOW):
        part = asks[start : start + _ASK_WINDOW]
        wire.send([b"".join((ASKING if asking else b"") + one.packed for one in part)])
        replies = wire.replies(len(part) * (1 + asking))
        found += [
            reply if type(reply) is bytes else redirected(reply, wire.server)
            for reply in replies[asking :: 1 + asking]
        ]
    return found


def look(wire: Wire, asks: Sequence[Ask], *, asking: bool = False) -> list[Reply | Redirect]:
    """Returns the answers as `ask` does, without marking the values as used (Redis 7.2)."""
    call(wire, b"CLIENT", b"NO-TOUCH", b"ON")
    found = ask(wire, asks, asking=asking)
    call(wire, b"CLIENT", b"NO-TOUCH", b"OFF")
    return found


def redirected(reply: Reply, server: Address) -> Reply | Redirect:
    """Returns the redirect in `reply` of `server`; `reply` itself if it is none."""
    if not isinstance(reply, hiredis.ReplyError):
        return reply
    words = str(reply).split()
    if len(words) < 3 or words[0] not in {"MOVED", "ASK"} or not words[1].isdecimal():
        return reply
    host, _, port = words[2].rpartition(":")
    if not port.isdecimal() or max(len(port), len(words[1])) > _MOST_DIGITS:
        return reply
    # A server that does not know its own host name omits it.
    return Redirect(int(words[1]), Address(host or server.host, int(port)), words[0] == "ASK")
