"""How much runs, waits and is held in memory at once, and when nothing more is taken in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from kvconnect.errors import ConfigurationError
from kvconnect.server.errors import Busy, Dropped, RequestRefused, ShuttingDown

__all__ = ["Abortable", "Admission", "Ticket"]


_FREE_NBYTES = 64 << 10
"""Of each body: what others hold never keeps out a request of ordinary size."""

_MAX_READING = 256
"""Bodies that are read at once. One that comes whole is read within milliseconds."""

_READING_PART = 4
"""Bodies that are being read have one part in so many of what all bodies may have, beside it."""

_MAX_LOGPROBS = 1 << 22
"""Log probabilities that the answers of all requests may hold: 8 bytes each, 300 as JSON is made"""


class Abortable(Protocol):
    """Work that is under way, as a `RequestHandle` is."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    def abort(self) -> None:
        """End it."""


class Ticket:
    """The place of one HTTP request among those that are answered.

    Args:
        admission: that gave it.

    Attributes:
        completions: that it takes; none before its body is known.
        logprobs: that its answer may hold.
        handles: of the work, once it was begun.
        body_nbytes: of its body, as far as it was read, that count.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._reading: asyncio.Timeout | None = None
        self._refused: RequestRefused | None = None
        self.completions = 0
        self.logprobs = 0
        self.handles: Sequence[Abortable] = ()
        self.body_nbytes = 0

    @property
    def is_reading(self) -> bool:
        """True while its body is read."""
        return self._reading is not None

    @asynccontextmanager
    async def reading(self, within_s: float) -> AsyncIterator[None]:
        """Inside it the body is read, which counts for no completion.

        Raises:
            RequestRefused: it took longer than `within_s` (408), or `drop` ended it.
        """
        try:
            async with asyncio.timeout(within_s) as self._reading:
                self._admission.begin_reading(self)
                yield
        except TimeoutError as error:
            raise self._refused or RequestRefused(
                408, f"the body did not come within {within_s:g} s", closes=True
            ) from error
        finally:
            self._reading = None

    def hold(self, body_nbytes: int) -> None:
        """So much of its body is in memory, until its answer ends.

        Raises:
            Busy: with the bodies of the others that is too much; it holds what it did.
        """
        self._admission.hold(self, body_nbytes)

    def drop(self, why: RequestRefused) -> None:
        """Ends the reading of its body; it is answered with `why`."""
        if self._reading is not None and self._refused is None:
            self._refused = why
            self._reading.reschedule(asyncio.get_running_loop().time())


class Admission:
    """Counts what is under way. Used by the event loop's thread only.

    Bodies that are being read have limits of their own, in number and in bytes, and take no room
    from what runs. At a limit the oldest of them is dropped: clients that never send theirs keep
    out no others.

    Args:
        max_completions: that run or wait at once at most.
        max_bodies_bytes: of the bodies of all requests together, of each what is beyond its first
            64 KiB.
        noun: what completions are called in what clients are told.
    """

    def __init__(
        self, max_completions: int, max_bodies_bytes: int, noun: str = "completions"
    ) -> None:
        self._max = max_completions
        self._max_bodies_bytes = max_bodies_bytes
        self._noun = noun
        self._tickets: dict[Ticket, None] = {}  # in order of arrival
        self._closed = False
        self._aborting = False

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._tickets

    @property
    def closed(self) -> bool:
        """Whether nothing is taken in any more."""
        return self._closed

    @property
    def completions(self) -> int:
        """That run or wait."""
        return sum(ticket.completions for ticket in self._tickets)

    @contextmanager
    def enter(self) -> Iterator[Ticket]:
        """The place of a request from its body to the end of its answer.

        Raises:
            Busy: there is none.
            ShuttingDown: nothing is taken in any more.
        """
        if self._closed:
            raise ShuttingDown
        self._check_room(1)
        ticket = Ticket(self)
        self._tickets[ticket] = None
        try:
            yield ticket
        finally:
            del self._tickets[ticket]

    def begin_reading(self, ticket: Ticket) -> None:
        """Makes room for the body of `ticket`."""
        others = [one for one in self._reading() if one is not ticket]
        for oldest in others[: max(0, len(others) + 1 - _MAX_READING)]:
            oldest.drop(Dropped())

    def hold(self, ticket: Ticket, body_nbytes: int) -> None:
        """So much of the body of `ticket` is in memory, until its answer ends.

        Raises:
            Busy: with those of the others that run or wait that is too much; `ticket` holds what it
                did.
        """
        counted = max(body_nbytes - _FREE_NBYTES, 0)
        if counted:
            self._check_bodies(ticket, counted)
        ticket.body_nbytes = counted

    def extend(self, ticket: Ticket, completions: int, logprobs: int = 0) -> None:
        """The body of `ticket` is there: it takes so many completions.

        Args:
            ticket: whose.
            completions: that come out of it.
            logprobs: that its answer may hold.

        Raises:
            ConfigurationError: that is more than there is ever room for.
            Busy: more than there is room for now.
        """
        if completions > self._max:
            raise ConfigurationError(
                f"n: {completions} completions of all prompts together are more than this server "
                f"runs at once, {self._max}; ask for fewer"
            )
        if logprobs > _MAX_LOGPROBS:
            raise ConfigurationError(
                f"logprobs: the answer may have {logprobs} log probabilities (those of each token "
                f"times tokens times completions), and {_MAX_LOGPROBS} are the most; lower "
                "max_tokens, n or logprobs"
            )
        self._check_room(completions - ticket.completions)
        held = sum(one.logprobs for one in self._tickets)
        if held + logprobs > _MAX_LOGPROBS:
            raise Busy(
                f"the answers that run or wait may have {held} log probabilities, of "
                f"{_MAX_LOGPROBS}; try again after a moment"
            )
        ticket.completions = completions
        ticket.logprobs = logprobs

    def submitted(self, ticket: Ticket, handles: Sequence[Abortable]) -> None:
        """`handles` run for `ticket`; they are aborted with all others.

        Raises:
            ShuttingDown: they were aborted already.
        """
        ticket.handles = handles
        if self._aborting:
            _abort(handles)
            raise ShuttingDown

    def close(self) -> None:
        """Take nothing in any more; what is under way goes on, and bodies are read no more."""
        self._closed = True
        for ticket in self._reading():
            ticket.drop(ShuttingDown())

    def abort(self) -> None:
        """End all that is under way; it leaves with an error in place of the rest."""
        self._closed = self._aborting = True
        for ticket in self._tickets:
            _abort(ticket.handles)

    def _reading(self) -> list[Ticket]:
        return [one for one in self._tickets if one.is_reading]

    def _check_room(self, more: int) -> None:
        taken = self.completions
        if taken + more > self._max:
            raise Busy(
                f"{taken} {self._noun} run or wait, and {self._max} may; try again after a moment"
            )

    def _check_bodies(self, ticket: Ticket, counted: int) -> None:
        """Makes sure that `counted` bytes of `ticket` fit beside those of its kind."""
        others = [
            one
            for one in self._tickets
            if one is not ticket and one.is_reading == ticket.is_reading
        ]
        held = sum(one.body_nbytes for one in others)
        if not ticket.is_reading:
            if held + counted > self._max_bodies_bytes:
                raise Busy(
                    f"the bodies of the requests that run or wait have {held} bytes, and "
                    f"may have {self._max_bodies_bytes}; try again after a moment"
                )
            return
        for oldest in others:
            if held + counted <= self._max_bodies_bytes // _READING_PART:
                return
            held -= oldest.body_nbytes
            oldest.drop(Dropped())


def _abort(handles: Sequence[Abortable]) -> None:
    for handle in handles:
        if not handle.done:
            handle.abort()
