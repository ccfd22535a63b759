"""How much runs, waits and is held in memory at once, and when nothing more is taken in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kvconnect.errors import ConfigurationError
from kvconnect.server.errors import Busy, ShuttingDown

__all__ = ["Abortable", "Admission", "Ticket"]


_FREE_NBYTES = 64 << 10
"""Of each body: what others hold never keeps out a request of ordinary size."""


class Abortable(Protocol):
    """Work that is under way, as a `RequestHandle` is."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    def abort(self) -> None:
        """End it."""


@dataclass(eq=False, slots=True)
class Ticket:
    """The place of one HTTP request among those that are answered.

    Attributes:
        completions: that it takes; one before its body is known.
        handles: of the work, once it was begun.
        body_nbytes: of its body, as far as it was read, that count.
    """

    completions: int = 1
    body_nbytes: int = 0
    handles: Sequence[Abortable] = field(default_factory=tuple)


class Admission:
    """Counts what is under way. Used by the event loop's thread only.

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
        self._bodies_bytes = 0
        self._noun = noun
        self._tickets: set[Ticket] = set()
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
        """That run or wait, or will once their request is read."""
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
        ticket = Ticket()
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.remove(ticket)
            self._bodies_bytes -= ticket.body_nbytes

    def hold(self, ticket: Ticket, body_nbytes: int) -> None:
        """So much of the body of `ticket` is in memory, until its answer ends.

        Raises:
            Busy: with those of the others that is too much; `ticket` holds what it did.
        """
        counted = max(body_nbytes - _FREE_NBYTES, 0)
        more = counted - ticket.body_nbytes
        if more > 0 and self._bodies_bytes + more > self._max_bodies_bytes:
            raise Busy(
                f"the bodies of the requests that run or wait have {self._bodies_bytes} bytes, and "
                f"may have {self._max_bodies_bytes}; try again after a moment"
            )
        self._bodies_bytes += more
        ticket.body_nbytes = counted

    def extend(self, ticket: Ticket, completions: int) -> None:
        """`ticket` turns out to take so many.

        Raises:
            ConfigurationError: that is more than there is ever room for.
            Busy: more than there is room for now.
        """
        if completions > self._max:
            raise ConfigurationError(
                f"n: {completions} completions of all prompts together are more than this server "
                f"runs at once, {self._max}; ask for fewer"
            )
        self._check_room(completions - ticket.completions)
        ticket.completions = completions

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
        """Take nothing in any more; what is under way goes on."""
        self._closed = True

    def abort(self) -> None:
        """End all that is under way; it leaves with an error in place of the rest."""
        self._closed = self._aborting = True
        for ticket in self._tickets:
            _abort(ticket.handles)

    def _check_room(self, more: int) -> None:
        taken = self.completions
        if taken + more > self._max:
            raise Busy(
                f"{taken} {self._noun} run or wait, and {self._max} may; try again after a moment"
            )


def _abort(handles: Sequence[Abortable]) -> None:
    for handle in handles:
        if not handle.done:
            handle.abort()
