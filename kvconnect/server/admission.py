"""Limits the requests that run or wait, and the memory of their bodies; refuses others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from kvconnect.errors import ConfigurationError
from kvconnect.server.errors import Busy, Dropped, RequestRefused, ShuttingDown

_FREE_NBYTES = 64 << 10
"""The bytes of each body that are not counted, so that a request of ordinary size always fits."""

_MAX_READING = 256
"""The most bodies that are read at once.

A body that arrives at once is read within milliseconds."""

_READING_PART = 4
"""The divisor of the limit of all bodies that gives the additional limit of bodies being read."""

_MAX_LOGPROBS = 1 << 22
"""Log probabilities that the answers of all requests may hold: 8 bytes each, 300 as JSON is made"""


class Abortable(Protocol):
    """The interface of running work, such as a `RequestHandle`."""

    @property
    def done(self) -> bool:
        """Returns whether the work has ended."""

    def abort(self) -> None:
        """Ends it."""


class Ticket:
    """The ticket of one HTTP request, valid from its body to the end of its answer.

    Args:
        admission: its issuer.

    Attributes:
        completions: the number of its completions; 0 until its body is parsed.
        logprobs: the most log probabilities in its answer.
        handles: the handles of its running work, once started.
        body_nbytes: the counted bytes of its body, as far as it was read.
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
        """Returns whether the body of the request is being read."""
        return self._reading is not None

    @asynccontextmanager
    async def reading(self, within_s: float) -> AsyncIterator[None]:
        """Limits the time of reading the body in the ``with`` block, before its completions count.

        Raises:
            RequestRefused: reading took longer than `within_s` (408), or `drop` ended it.
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
        """Counts `body_nbytes` of its body as held in memory until its answer ends.

        Raises:
            Busy: all bodies together exceed the limit; the count is unchanged.
        """
        counted = max(body_nbytes - _FREE_NBYTES, 0)
        if counted:
            self._admission.check_bodies(self, counted)
        self.body_nbytes = counted

    def drop(self, why: RequestRefused) -> None:
        """Ends the reading of its body, and answers the request with the error `why`."""
        if self._reading is not None and self._refused is None:
            self._refused = why
            self._reading.reschedule(asyncio.get_running_loop().time())


class Admission:
    """Counts running requests. Used by the event loop's thread only.

    Bodies that are being read have limits of their own, in number and in bytes, apart from those of
    running requests. At a limit the oldest one is dropped, so that clients that never send their
    bodies do not block others.

    Args:
        max_completions: the most completions that run or wait at once.
        max_bodies_bytes: the most bytes of all bodies together, not counting the first 64 KiB of
            each.
        noun: the word for completions in messages to clients.
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
        """Returns whether nothing is running."""
        return not self._tickets

    @property
    def closed(self) -> bool:
        """Returns whether new requests are refused."""
        return self._closed

    @property
    def completions(self) -> int:
        """The number of completions that run or wait."""
        return sum(ticket.completions for ticket in self._tickets)

    @contextmanager
    def enter(self) -> Iterator[Ticket]:
        """Admits a request, from its body to the end of its answer.

        Raises:
            Busy: a limit is reached.
            ShuttingDown: new requests are refused.
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
        """Starts counting the body of `ticket` as being read; drops the oldest one at a limit."""
        others = [one for one in self._reading() if one is not ticket]
        for oldest in others[: max(0, len(others) + 1 - _MAX_READING)]:
            oldest.drop(Dropped())

    def extend(self, ticket: Ticket, completions: int, logprobs: int = 0) -> None:
        """Counts `completions` for `ticket`, whose body has been parsed.

        Args:
            ticket: the ticket of the request.
            completions: the completions of all its prompts.
            logprobs: the most log probabilities in its answer.

        Raises:
            ConfigurationError: the request alone exceeds a limit.
            Busy: with the running requests it exceeds a limit.
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
        """Registers `handles`, which run for `ticket`, so that `abort` reaches them.

        Raises:
            ShuttingDown: all requests were aborted before.
        """
        ticket.handles = handles
        if self._aborting:
            _abort(handles)
            raise ShuttingDown

    def close(self) -> None:
        """Refuses new requests, and drops those whose bodies are being read; others continue."""
        self._closed = True
        for ticket in self._reading():
            ticket.drop(ShuttingDown())

    def abort(self) -> None:
        """Aborts all running requests; their answers end with an error."""
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

    def check_bodies(self, ticket: Ticket, counted: int) -> None:
        """Checks that `counted` bytes of `ticket` fit beside those of its kind.

        Raises:
            Busy: they exceed the limit with the bodies of requests that run or wait.
        """
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
