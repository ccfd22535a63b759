"""Values fetched on one connection, into the memory of who wants them. Blocks."""

from __future__ import annotations

from collections.abc import Sequence

import hiredis

from kvconnect.backends.redis.commands import (
    ASKING,
    Fetched,
    Outcome,
    Redirect,
    Want,
    command,
    redirected,
)
from kvconnect.backends.redis.format import HEAD_NBYTES, Head
from kvconnect.backends.redis.settings import Address
from kvconnect.backends.redis.wire import Wire
from kvconnect.errors import BackendUnavailable

__all__ = ["fetch"]

_AHEAD_NBYTES = 1 << 20


def fetch(
    wire: Wire, wants: Sequence[Want], server: Address, *, asking: bool = False
) -> list[Fetched]:
    """Fill what `wants` say, in order; after the first that is not there, nothing is touched."""
    return _Fetch(wire, wants, server, asking=asking).run()


class _Fetch:
    """Values on their way from one server.

    Small ones are asked for ahead. A large one when the one before it begins to arrive: the server
    copies a value for every request that it has read, and does that while we receive. Where other
    connections keep it busy anyway, only when the one before is here: a server whose memory
    allocator is libc's takes more than twice as long for a value once it has four at a time.
    """

    def __init__(self, wire: Wire, wants: Sequence[Want], server: Address, *, asking: bool) -> None:
        self._wire = wire
        self._wants = wants
        self._server = server
        self._asking = asking
        self._sent = 0
        self._under_way = 0  # bytes asked for and not begun, as far as buffers tell their number
        self._missed = False

    def run(self) -> list[Fetched]:
        found: list[Fetched] = []
        for number, want in enumerate(self._wants):
            self._request()
            if number == self._sent:
                return found + [Outcome.NOT_TRIED] * (len(self._wants) - number)
            if self._asking:
                self._wire.line()
            result = self._receive(want)
            # What is elsewhere is fetched from there, and what follows it is wanted, too.
            there = isinstance(result, (Head, Redirect)) or result is Outcome.DONE
            self._missed |= not there
            found.append(result)
        return found

    def _request(self) -> None:
        requests = []
        while (
            self._sent < len(self._wants) and self._under_way < _AHEAD_NBYTES and not self._missed
        ):
            want = self._wants[self._sent]
            requests.append((ASKING if self._asking else b"") + command(b"GET", want.name))
            self._under_way += _weight(want)
            self._sent += 1
        if requests:
            self._wire.send([b"".join(requests)])

    def _request_early(self) -> None:
        if self._wire.alone():
            self._request()

    def _receive(self, want: Want) -> Fetched:
        nbytes = self._wire.bulk_nbytes()
        self._under_way -= _weight(want)
        if nbytes is None:
            return Outcome.ABSENT
        if isinstance(nbytes, hiredis.ReplyError):
            answer = redirected(nbytes, self._server)
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
            self._request_early()
            self._wire.into(want.into)
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
        self._request_early()
        self._wire.skip(head.metadata_nbytes)
        part = head.part(0)
        self._wire.into(want.into[part])
        if want.checksum is not None:
            want.checksum.passed(part.start, part.stop)  # while the processor's cache has it
        return head


def _weight(want: Want) -> int:
    return max(1, len(want.into))
