"""The events of channels, and a queue that passes them to another thread."""

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
    """The channel is open. The first event of each channel.

    Attributes:
        hello: what the peer said of itself.
    """

    hello: Hello


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The channel is closed. The last event of each channel that was `Connected`.

    Attributes:
        reason: for messages.
    """

    reason: str


Event: TypeAlias = Connected | Message | Disconnected


class Sender(Protocol):
    """The part of a `Channel` that receivers of its events use; one object for each connection."""

    @property
    def peer(self) -> Hello:
        """The peer's `Hello`."""

    def send(self, message: Message) -> bool:
        """Queues `message`, as `Channel.send` does."""

    def close(self, reason: str = ...) -> None:
        """Closes the channel, as `Channel.close` does."""


Deliver: TypeAlias = Callable[[Sender, Event], None]
"""Receives each event on the thread that reads the channel. Must not block: meanwhile the peer's
heartbeat is not read. An exception closes the channel."""


@dataclass(frozen=True, slots=True)
class Received:
    """An event and its channel."""

    channel: Sender
    event: Event


class EventQueue:
    """The events of any number of channels, for one thread that takes them when it is ready.

    Pass ``deliver=queue.put``. The queue is bounded: if its reader is too slow, channels are
    closed, which peers must handle anyway.

    Args:
        limit: the number of events that may wait.
        wake: called without arguments when an event comes to an empty queue; must not block.
    """

    def __init__(self, limit: int = 16_384, wake: Callable[[], object] = lambda: None) -> None:
        self._events: deque[Received] = deque()
        self._lock = threading.Lock()
        self._limit = limit
        self._wake = wake

    def put(self, channel: Sender, event: Event) -> None:
        """Appends `event`; see `Deliver`.

        Raises:
            RetryLater: `limit` events are waiting. `Disconnected` is always accepted, since each
                channel has only one.
        """
        with self._lock:
            if len(self._events) >= self._limit and not isinstance(event, Disconnected):
                raise RetryLater(f"{self._limit} events of peers wait and are not taken")
            self._events.append(Received(channel, event))
            first = len(self._events) == 1
        if first:
            self._wake()

    def take(self) -> list[Received]:
        """Returns all events so far, oldest first, and removes them. Does not block."""
        with self._lock:
            taken, self._events = self._events, deque()
        return list(taken)
