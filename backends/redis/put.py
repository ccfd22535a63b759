"""Values put on one connection, from the memory they are in. Blocks.

Within a window: enough under way that neither side waits for the other, little enough that not
much is moved in vain after a refusal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import hiredis

from kvconnect.backends.redis.commands import (
    ASKING,
    REFUSALS,
    Outcome,
    Put,
    Redirect,
    Refused,
    Stored,
    ask,
    head_command,
    redirected,
    sound,
    state_of,
)
from kvconnect.backends.redis.format import Head
from kvconnect.backends.redis.settings import Address
from kvconnect.backends.redis.wire import Reply, Wire

__all__ = ["put"]

_WINDOW_NBYTES = 4 << 20


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
        if one.checksum is not None:
            one.checksum.seal()
        head, tail = _set_command(one)
        wire.send([(ASKING if asking else b"") + head, *one.pieces, tail])
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
    answer = redirected(reply, server)
    if isinstance(answer, Redirect):
        return answer
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(REFUSALS):
        return Refused(str(reply), server)
    return Outcome.THERE if sound(reply) is None else Outcome.DONE
