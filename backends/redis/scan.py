"""What a Redis server holds of one store: the keys of its blocks, and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import hiredis

from kvconnect.backends.redis.format import Names
from kvconnect.backends.redis.settings import Address
from kvconnect.backends.redis.transfer import command, sound
from kvconnect.backends.redis.wire import Reply, Wire
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey

__all__ = ["Page", "Survey", "info", "scan_page", "survey"]

_PAGE = 512
_SURVEYED = 200_000


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a server's blocks; `cursor` asks for the next, 0: this is the last."""

    cursor: int
    keys: list[BlockKey]


@dataclass(frozen=True, slots=True)
class Survey:
    """Numbers of one server.

    Attributes:
        blocks, nbytes: of this store; estimated from `_SURVEYED` keys where there are more.
        used: bytes of memory the server uses, for all that it holds.
        limit: its ``maxmemory``; 0: none.
    """

    blocks: int
    nbytes: int
    used: int
    limit: int


def scan_page(names: Names, cursor: int, wire: Wire, server: Address) -> Page:
    """The blocks of one step of SCAN."""
    after, found = _step(wire, names.prefix + b"b:", cursor)
    return Page(after, [key for name in found if (key := names.key(name)) is not None])


def survey(names: Names, wire: Wire, server: Address) -> Survey:
    """Numbers of what one server holds."""
    wire.send([command(b"DBSIZE")])
    total = sound(wire.replies(1)[0])
    seen = blocks = nbytes = cursor = 0
    while True:
        cursor, found = _step(wire, b"", cursor)
        ours = [n for n in found if n.startswith((names.prefix + b"b:", names.prefix + b"p:"))]
        wire.send([command(b"STRLEN", name) for name in ours])
        lengths = wire.replies(len(ours))
        seen += len(found)
        blocks += sum(names.key(name) is not None for name in ours)
        nbytes += sum(length for length in lengths if isinstance(length, int))
        if cursor == 0 or seen >= _SURVEYED:
            break
    if cursor and seen and isinstance(total, int):
        blocks, nbytes = blocks * total // seen, nbytes * total // seen
    numbers = info(wire, "memory")
    return Survey(
        blocks, nbytes, int(numbers.get("used_memory", 0)), int(numbers.get("maxmemory", 0))
    )


def info(wire: Wire, section: str) -> dict[str, str]:
    """What a server says of itself; empty if the user may not ask."""
    wire.send([command(b"INFO", section)])
    (reply,) = wire.replies(1)
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOPERM"):
        return {}
    return dict(_pairs(_text(reply).decode("utf-8", "replace")))


def _text(reply: Reply) -> bytes:
    answer = sound(reply)
    if not isinstance(answer, bytes):
        raise BackendUnavailable(f"Redis: {answer!r} where bytes were due")
    return answer


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name, value


def _step(wire: Wire, stem: bytes, cursor: int) -> tuple[int, list[bytes]]:
    words: list[bytes | int] = [b"SCAN", cursor, b"COUNT", _PAGE]
    if stem:
        words += [b"MATCH", _escaped(stem) + b"*"]
    wire.send([command(*words)])
    reply: Reply = sound(wire.replies(1)[0])
    match reply:
        case [bytes() as after, list() as found] if after.isdigit():
            return int(after), [name for name in found if isinstance(name, bytes)]
    raise BackendUnavailable(f"Redis: {reply!r} is no answer to SCAN")


def _escaped(text: bytes) -> bytes:
    return b"".join(b"\\%c" % byte if byte in b"*?[]\\^-" else b"%c" % byte for byte in text)
