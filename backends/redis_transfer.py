"""What is done on one connection: small commands, values fetched, values put. Blocks.

Commands are pipelined, values within a window: enough under way that neither side waits for the
other, few enough that little is moved in vain after a miss and that a server holds little for us.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import hiredis

from kvconnect.backends.redis_settings import Address
from kvconnect.backends.redis_value import HEAD_NBYTES, Head
from kvconnect.backends.redis_wire import Bytes, Reply, Wire
from kvconnect.errors import BackendUnavailable

__all__ = [
    "Ask",
    "Fetched",
    "Outcome",
    "Put",
    "Redirect",
    "Refused",
    "Stored",
    "Want",
    "ask",
    "command",
    "fetch",
    "put",
    "sound",
]

_WINDOW_NBYTES = 4 << 20
_ASK_WINDOW = 512
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_REFUSALS = ("OOM", "MISCONF", "READONLY", "NOREPLICAS")


class Outcome(enum.Enum):
    """What became of one value."""

    DONE = enum.auto()
    ABSENT = enum.auto()
    """Of a fetch: there is none. Of a put that must not replace: there is one."""
    UNFIT = enum.auto()
    """It is not as long as its place."""
    BROKEN = enum.auto()
    """It is no block of ours, or a damaged one."""
    NOT_TRIED = enum.auto()


@dataclass(frozen=True, slots=True)
class Redirect:
    """Another server of the cluster has the key.

    Attributes:
        slot: of the key.
        asking: only for this once: the slot is on its way.
    """

    slot: int
    address: Address
    asking: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The server takes no writes now.

    Attributes:
        reason: in its own words.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A small command.

    Attributes:
        name: the key it is about.
        packed: the command as sent.
    """

    name: bytes
    packed: bytes

    @property
    def nbytes(self) -> int:
        """Of values that are moved."""
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A value to fetch.

    Attributes:
        into: where its part of the frame goes. A value with a head may be shorter than that.
        headed: it begins with a `Head`; else it is exactly as long as `into`.
    """

    name: bytes
    into: memoryview
    headed: bool = True

    @property
    def nbytes(self) -> int:
        """Of values that are moved."""
        return len(self.into)


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """A value to store.

    Attributes:
        pieces: the value, one after the other.
        ttl_ms: after which it is gone; ``None``: never.
        replace: also if there is one.
    """

    name: bytes
    pieces: tuple[Bytes, ...]
    ttl_ms: int | None = None
    replace: bool = True

    @property
    def nbytes(self) -> int:
        """Of values that are moved."""
        return sum(len(piece) for piece in self.pieces)


Fetched: TypeAlias = Head | Outcome | Redirect
Stored: TypeAlias = Refused | Outcome | Redirect


def command(*words: bytes | int | str) -> bytes:
    """A command as it is sent."""
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packed


def sound(reply: Reply) -> Reply:
    """`reply`, if it is no error.

    Raises:
        BackendUnavailable: it is one.
    """
    if isinstance(reply, hiredis.ReplyError):
        raise BackendUnavailable(f"the server says: {reply}")
    return reply


def ask(
    wire: Wire, asks: Sequence[Ask], server: Address, *, asking: bool = False
) -> list[Reply | Redirect]:
    """The answers to `asks`; errors are answers."""
    found: list[Reply | Redirect] = []
    for start in range(0, len(asks), _ASK_WINDOW):
        part = asks[start : start + _ASK_WINDOW]
        wire.send([b"".join((_ASKING if asking else b"") + one.packed for one in part)])
        replies = wire.replies(len(part) * (1 + asking))
        found += [_redirected(reply, server) for reply in replies[asking :: 1 + asking]]
    return found


def fetch(
    wire: Wire, wants: Sequence[Want], server: Address, *, asking: bool = False
) -> list[Fetched]:
    """Fill what `wants` say, in order; after the first that is not there, nothing is touched."""
    found: list[Fetched] = []
    sent = under_way = 0
    missed = False
    while len(found) < len(wants):
        requests = []
        while not missed and sent < len(wants) and (under_way < _WINDOW_NBYTES or not under_way):
            requests.append((_ASKING if asking else b"") + command(b"GET", wants[sent].name))
            under_way += max(1, wants[sent].nbytes)
            sent += 1
        if requests:
            wire.send([b"".join(requests)])
        if len(found) == sent:
            found += [Outcome.NOT_TRIED] * (len(wants) - sent)
            break
        want = wants[len(found)]
        if asking:
            wire.line()
        result = _fetch_one(wire, want, server, forget=missed)
        under_way -= max(1, want.nbytes)
        missed = missed or not (isinstance(result, Head) or result is Outcome.DONE)
        found.append(result)
    return found


def put(wire: Wire, puts: Sequence[Put], server: Address, *, asking: bool = False) -> list[Stored]:
    """Store `puts`, in order; after the first that is refused no more are tried."""
    found: list[Stored] = []
    waiting: list[int] = []  # bytes of those sent and not answered
    refused = False
    for one in puts:
        if refused:
            break
        head, tail = _set_command(one)
        wire.send([(_ASKING if asking else b"") + head, *one.pieces, tail])
        waiting.append(one.nbytes)
        while sum(waiting) > _WINDOW_NBYTES:
            found.append(_stored(wire, server, asking=asking))
            del waiting[0]
            refused = refused or isinstance(found[-1], Refused)
    found += [_stored(wire, server, asking=asking) for _ in waiting]
    return found + [Outcome.NOT_TRIED] * (len(puts) - len(found))


def _fetch_one(wire: Wire, want: Want, server: Address, *, forget: bool) -> Fetched:
    nbytes = wire.bulk_nbytes()
    if nbytes is None:
        return Outcome.ABSENT
    if isinstance(nbytes, hiredis.ReplyError):
        answer = _redirected(nbytes, server)
        if isinstance(answer, Redirect):
            return answer
        if str(nbytes).startswith("WRONGTYPE"):
            return Outcome.BROKEN
        raise BackendUnavailable(f"the server says: {nbytes}")
    if forget:
        result: Fetched = Outcome.NOT_TRIED
        wire.skip(nbytes)
    elif want.headed:
        result = _fetch_headed(wire, want, nbytes)
    elif nbytes == len(want.into):
        result = Outcome.DONE
        wire.into(want.into)
    else:
        result = Outcome.BROKEN
        wire.skip(nbytes)
    wire.end_bulk()
    return result


def _fetch_headed(wire: Wire, want: Want, nbytes: int) -> Head | Outcome:
    head = Head.parse(start := wire.exactly(min(nbytes, HEAD_NBYTES)))
    if head is None or head.value_nbytes != nbytes:
        wire.skip(nbytes - len(start))
        return Outcome.BROKEN
    if head.frame_nbytes > len(want.into):
        wire.skip(nbytes - len(start))
        return Outcome.UNFIT
    wire.skip(head.metadata_nbytes)
    wire.into(want.into[head.part(0)])
    return head


def _set_command(one: Put) -> tuple[bytes, bytes]:
    """What is sent before and after the value."""
    options = [] if one.replace else [b"NX"]
    if one.ttl_ms is not None:
        options += [b"PX", b"%d" % one.ttl_ms]
    tail = b"".join(b"\r\n$%d\r\n%s" % (len(word), word) for word in options) + b"\r\n"
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (
        3 + len(options),
        len(one.name),
        one.name,
        one.nbytes,
    )
    return head, tail


def _stored(wire: Wire, server: Address, *, asking: bool) -> Stored:
    reply = wire.replies(1 + asking)[-1]
    answer = _redirected(reply, server)
    if isinstance(answer, Redirect):
        return answer
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(_REFUSALS):
        return Refused(str(reply))
    return Outcome.ABSENT if sound(reply) is None else Outcome.DONE


def _redirected(reply: Reply, server: Address) -> Reply | Redirect:
    if not isinstance(reply, hiredis.ReplyError):
        return reply
    words = str(reply).split()
    if len(words) < 3 or words[0] not in {"MOVED", "ASK"} or not words[1].isdecimal():
        return reply
    host, _, port = words[2].rpartition(":")
    if not port.isdecimal():
        return reply
    # A server that does not know its own name leaves it out.
    return Redirect(int(words[1]), Address(host or server.host, int(port)), words[0] == "ASK")
