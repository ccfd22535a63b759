"""What is done on one connection: small commands, values fetched, values put. Blocks.

Commands are pipelined, values within a window: enough under way that neither side waits for the
other, few enough that little is moved in vain after a miss and that a server holds little for us.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import hiredis

from kvconnect.backends.redis_settings import Address
from kvconnect.backends.redis_value import HEAD_NBYTES, Head
from kvconnect.backends.redis_wire import Bytes, Reply, Wire
from kvconnect.errors import BackendUnavailable

__all__ = [
    "REFUSALS",
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
    "head_command",
    "put",
    "sound",
    "state_of",
]

_WINDOW_NBYTES = 4 << 20
_AHEAD_NBYTES = 1 << 20
_ASK_WINDOW = 512
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_GET_HEAD = b"*4\r\n$8\r\nGETRANGE\r\n$%%d\r\n%%s\r\n$1\r\n0\r\n$%d\r\n%d\r\n" % (
    len(str(HEAD_NBYTES - 1)),
    HEAD_NBYTES - 1,
)
REFUSALS = ("OOM", "MISCONF", "READONLY", "NOREPLICAS")


class Outcome(enum.Enum):
    """What became of one value."""

    DONE = enum.auto()
    ABSENT = enum.auto()
    THERE = enum.auto()
    """There is one already; it was not replaced."""
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
    server: Address


class Ask(NamedTuple):
    """A small command. A tuple: a lookup makes one for every block.

    Attributes:
        name: the key it is about.
        packed: the command as sent.
    """

    name: bytes
    packed: bytes


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
        look_first: look for a block of that name, and send nothing if it is there.
    """

    name: bytes
    pieces: tuple[Bytes, ...]
    ttl_ms: int | None = None
    replace: bool = True
    look_first: bool = False

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


def head_command(name: bytes) -> Ask:
    """Asks for what `state_of` reads; the value counts as used."""
    return Ask(name, _GET_HEAD % (len(name), name))


def state_of(reply: Reply) -> Head | Outcome:
    """The head of the value, ``ABSENT`` or ``BROKEN``.

    Raises:
        BackendUnavailable: the server does not say.
    """
    if isinstance(reply, bytes):
        return Head.parse(reply) or (Outcome.BROKEN if reply else Outcome.ABSENT)
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("WRONGTYPE"):
        return Outcome.BROKEN
    raise BackendUnavailable(f"the server says {sound(reply)!r} where bytes were due")


def ask(
    wire: Wire, asks: Sequence[Ask], server: Address, *, asking: bool = False
) -> list[Reply | Redirect]:
    """The answers to `asks`; errors are answers."""
    found: list[Reply | Redirect] = []
    for start in range(0, len(asks), _ASK_WINDOW):
        part = asks[start : start + _ASK_WINDOW]
        wire.send([b"".join((_ASKING if asking else b"") + one.packed for one in part)])
        replies = wire.replies(len(part) * (1 + asking))
        found += [
            reply if type(reply) is bytes else _redirected(reply, server)
            for reply in replies[asking :: 1 + asking]
        ]
    return found


def fetch(
    wire: Wire, wants: Sequence[Want], server: Address, *, asking: bool = False
) -> list[Fetched]:
    """Fill what `wants` say, in order; after the first that is not there, nothing is touched."""
    return _Fetch(wire, wants, server, asking=asking).run()


def put(wire: Wire, puts: Sequence[Put], server: Address, *, asking: bool = False) -> list[Stored]:
    """Store `puts`, in order; after the first that is refused no more are tried."""
    found: list[Stored] = [Outcome.NOT_TRIED] * len(puts)
    looked_for = [number for number, one in enumerate(puts) if one.look_first]
    heads = ask(
        wire, [head_command(puts[number].name) for number in looked_for], server, asking=asking
    )
    for number, reply in zip(looked_for, heads, strict=True):
        found[number] = _found_there(reply)
    waiting: deque[int] = deque()
    under_way = 0
    refused = False

    def settle() -> None:
        nonlocal under_way, refused
        number = waiting.popleft()
        found[number] = _stored(wire, server, asking=asking)
        under_way -= puts[number].nbytes
        refused = refused or isinstance(found[number], Refused)

    for number, one in enumerate(puts):
        if refused or found[number] is not Outcome.NOT_TRIED:
            continue
        head, tail = _set_command(one)
        wire.send([(_ASKING if asking else b"") + head, *one.pieces, tail])
        waiting.append(number)
        under_way += one.nbytes
        while under_way > _WINDOW_NBYTES:
            settle()
    while waiting:
        settle()
    return found


def _found_there(reply: Reply | Redirect) -> Stored:
    if isinstance(reply, Redirect):
        return reply
    state = state_of(reply)
    if isinstance(state, Head):
        # Whether its other values are there is not known here.
        return Outcome.THERE if state.num_parts == 1 else Outcome.BROKEN
    return Outcome.BROKEN if state is Outcome.BROKEN else Outcome.NOT_TRIED


class _Fetch:
    """Values on their way from one server.

    The next one is asked for while the end of this one arrives. Earlier than that is slower: the
    server copies a value for every request that it has read.
    """

    def __init__(self, wire: Wire, wants: Sequence[Want], server: Address, *, asking: bool) -> None:
        self._wire = wire
        self._wants = wants
        self._server = server
        self._asking = asking
        self._sent = 0
        self._under_way = 0  # bytes asked for and not here, as far as buffers tell their number
        self._due = 0  # those of the value that arrives now
        self._missed = False

    def run(self) -> list[Fetched]:
        found: list[Fetched] = []
        for number, want in enumerate(self._wants):
            self._request()
            if number == self._sent:
                return found + [Outcome.NOT_TRIED] * (len(self._wants) - number)
            self._due = _weight(want)
            if self._asking:
                self._wire.line()
            result = self._receive(want)
            self._under_way -= self._due
            self._missed |= not (isinstance(result, Head) or result is Outcome.DONE)
            found.append(result)
        return found

    def _request(self) -> None:
        requests = []
        while (
            self._sent < len(self._wants) and self._under_way < _AHEAD_NBYTES and not self._missed
        ):
            want = self._wants[self._sent]
            requests.append((_ASKING if self._asking else b"") + command(b"GET", want.name))
            self._under_way += _weight(want)
            self._sent += 1
        if requests:
            self._wire.send([b"".join(requests)])

    def _receive(self, want: Want) -> Fetched:
        nbytes = self._wire.bulk_nbytes()
        if nbytes is None:
            return Outcome.ABSENT
        if isinstance(nbytes, hiredis.ReplyError):
            answer = _redirected(nbytes, self._server)
            if isinstance(answer, Redirect):
                return answer
            if str(nbytes).startswith("WRONGTYPE"):
                return Outcome.BROKEN
            raise BackendUnavailable(f"the server says: {nbytes}")
        if self._missed:
            result: Fetched = Outcome.NOT_TRIED
            self._wire.skip(nbytes)
        elif want.headed:
            result = self._receive_headed(want, nbytes)
        elif nbytes == len(want.into):
            result = Outcome.DONE
            self._arrive(want.into)
        else:
            result = Outcome.BROKEN
            self._wire.skip(nbytes)
        self._wire.end_bulk()
        return result

    def _receive_headed(self, want: Want, nbytes: int) -> Head | Outcome:
        start = self._wire.exactly(min(nbytes, HEAD_NBYTES))
        head = Head.parse(start)
        if head is None or head.value_nbytes != nbytes:
            self._wire.skip(nbytes - len(start))
            return Outcome.BROKEN
        if head.frame_nbytes > len(want.into):
            self._wire.skip(nbytes - len(start))
            return Outcome.UNFIT
        self._wire.skip(head.metadata_nbytes)
        self._arrive(want.into[head.part(0)])
        return head

    def _arrive(self, view: memoryview) -> None:
        early = self._under_way - _AHEAD_NBYTES
        if 0 < early < len(view):
            self._wire.into(view[:early])
            self._under_way -= early
            self._due -= early
            self._request()
            view = view[early:]
        self._wire.into(view)


def _weight(want: Want) -> int:
    return max(1, len(want.into))


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
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(REFUSALS):
        return Refused(str(reply), server)
    return Outcome.THERE if sound(reply) is None else Outcome.DONE


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
