"""What happens on channels, and how it gets from their threads to another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvconnect.errors import RetryLater
from kvconnect.transfer.control.messages import Hello, Message

__all__ = ["Connected", "Deliver", "Disconnected", "Event", "EventQueue", "Received", "Sender"]


@dataclass(frozen=True, slots=True)
class Connected:
    """The channel is open; the first event of each.

    Attributes:
        hello: what the peer said of itself.
    """

    hello: Hello


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The channel is closed; the last event of each that was `Connected`.

    Attributes:
        reason: for messages.
    """

    reason: str


Event: TypeAlias = Connected | Message | Disconnected


class Sender(Protocol):
    """What of a `Channel` those need who hear its events; one object for each connection."""

    @property
    def peer(self) -> Hello:
        """What the peer said of itself."""

    def send(self, message: Message) -> bool:
        """As `Channel.send`."""

    def close(self, reason: str = ...) -> None:
        """As `Channel.close`."""


Deliver: TypeAlias = Callable[[Sender, Event], None]
"""Takes each event, on the thread that reads the channel, and must not block: while it does, the
peer's heartbeat is not heard. What it raises closes the channel."""


@dataclass(frozen=True, slots=True)
class Received:
    """An event and its channel."""

    channel: Sender
    event: Event


class EventQueue:
    """Events of any number of channels, for one thread that takes them when it likes.

    ``deliver=queue.put``. Bounded: where its reader does not keep up, channels are closed, which
    peers are prepared for.

    Args:
        limit: so many events may wait.
        wake: called without arguments when an event comes to an empty queue; must not block.
    """

    def __init__(self, limit: int = 16_384, wake: Callable[[], object] = lambda: None) -> None:
        self._events: deque[Received] = deque()
        self._lock = threading.Lock()
        self._limit = limit
        self._wake = wake

    def put(self, channel: Sender, event: Event) -> None:
        """Leaves `event`; see `Deliver`.

        Raises:
            RetryLater: `limit` are waiting. That a channel is closed is always taken: there are no
                more of those than channels were taken.
        """
        with self._lock:
            if len(self._events) >= self._limit and not isinstance(event, Disconnected):
                raise RetryLater(f"{self._limit} events of peers wait and are not taken")
            self._events.append(Received(channel, event))
            first = len(self._events) == 1
        if first:
            self._wake()

    def take(self) -> list[Received]:
        """All events so far, oldest first, those of one channel in their order; does not block."""
        with self._lock:
            taken, self._events = self._events, deque()
        return list(taken)
