"""The loads from Redis, which receive values directly into the caller's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING

import hiredis

from kvconnect.backends.redis.commands import (
    ASKING,
    Fetched,
    Outcome,
    Redirect,
    Want,
    command,
    of_another_type,
    redirected,
)
from kvconnect.backends.redis.find import RedisFinder, leading_heads
from kvconnect.backends.redis.format import HEAD_NBYTES, Head
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.settings import Mode
from kvconnect.backends.redis.wire import Wire
from kvconnect.errors import BackendUnavailable
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.trace import count

if TYPE_CHECKING:
    from torch import Tensor

_AHEAD_NBYTES = 1 << 20


async def load(
    router: RedisRouter,
    finder: RedisFinder,
    keys: Sequence[BlockKey],
    into: Sequence[Tensor],
    checksums: Sequence[FrameChecksum],
) -> int:
    """Fills leading buffers; the others stay unchanged unless blocks vanish meanwhile.

    Runs on the event loop. If there are `checksums`, each hashes the first part of its frame.
    """
    views = [buffer.numpy().data for buffer in into]
    wanted = [router.names.block(key) for key in keys]
    if router.settings.mode is Mode.CLUSTER and len(wanted) > 1:
        # Servers do not notice each other's misses, and slots may move.
        heads = await finder.leading(keys)
        while heads and heads[-1].frame_nbytes > len(views[len(heads) - 1]):
            heads.pop()
        del wanted[len(heads) :]
    results = await router.run(
        fetch,
        [
            Want(name, view, checksum=checksum)
            for name, view, checksum in zip_longest(wanted, views, checksums)
            if name is not None
        ],
        "fetch",
    )
    broken = {keys[n] for n, result in enumerate(results) if result is Outcome.BROKEN}
    heads = leading_heads(results)
    parts = [
        (number, Want(name, views[number][head.part(part)], headed=False))
        for number, head in enumerate(heads)
        for part, name in enumerate(router.names.parts(keys[number], head), 1)
    ]
    good = len(heads)
    if parts:
        filled = await router.run(fetch, [want for _, want in parts], "fetch")
        for (number, _), result in zip(parts, filled, strict=True):
            if result is not Outcome.DONE:
                good = min(good, number)
            if result in {Outcome.ABSENT, Outcome.BROKEN}:
                broken.add(keys[number])
    if broken:
        count("redis.broken", blocks=len(broken))
        with suppress(BackendUnavailable):  # those before are good; it costs another try
            await finder.delete(sorted(broken))
    return good


def fetch(wire: Wire, wants: Sequence[Want], *, asking: bool = False) -> list[Fetched]:
    """Fetches `wants`, in order; fills no buffer after the first absent value. Blocks."""
    return _Fetch(wire, wants, asking=asking).run()


class _Fetch:
    """A fetch of values from one server.

    Small values are requested ahead. A large value is requested when the one before it begins to
    arrive, so that the server copies it while the earlier one is received. If other connections
    keep the server busy, it is requested only when the one before it has arrived: a server with
    libc's allocator takes more than twice as long for a value once it holds four.
    """

    def __init__(self, wire: Wire, wants: Sequence[Want], *, asking: bool) -> None:
        self._wire = wire
        self._wants = wants
        self._asking = asking
        self._sent = 0
        self._under_way = 0  # requested bytes whose value has not begun to arrive
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
            # A value on another server is fetched from that server, and the values after it are
            # still fetched here.
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
            answer = redirected(nbytes, self._wire.server)
            if isinstance(answer, Redirect):
                return answer
            if of_another_type(nbytes):
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
