"""The settings of a process's channels, the events of a channel, and their receiver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvconnect.transfer.control.messages import Hello, Message
from kvconnect.transfer.secret import SharedSecret


@dataclass(frozen=True, slots=True)
class Connected:
    """The first event of each channel: the channel is open.

    Attributes:
        hello: the peer's description of itself.
    """

    hello: Hello


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The last event of each channel that was `Connected`: the channel is closed.

    Attributes:
        reason: why it closed, as text for logs and errors.
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
"""Receives each event on the thread that reads the channel. Must not block, since the peer's
heartbeat is not read meanwhile. An exception closes the channel."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a control channel, in seconds.

    Attributes:
        heartbeat_s: the time between two heartbeats.
        silence_s: a peer without a heartbeat for so long counts as dead. The default tolerates a
            peer whose interpreter is busy for a while.
        handshake_s: the longest time for the whole opening of a connection.
        first_pause_s, last_pause_s: the first and the longest pause between attempts to connect;
            each pause is double the one before.
    """

    heartbeat_s: float = 0.5
    silence_s: float = 2.5
    handshake_s: float = 3.0
    first_pause_s: float = 0.1
    last_pause_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The settings of a process's channels.

    Attributes:
        hello: returns the process's `Hello`. It is called for each connection, on a thread of the
            channel, so that peers learn of a rebuilt transport. Must not block.
        deliver: receives the events of all channels.
        secret: shared with all peers; ``None`` allows loopback only.
        timing: the times of all channels.
    """

    hello: Callable[[], Hello]
    deliver: Deliver
    secret: SharedSecret | None = None
    timing: Timing = field(default_factory=Timing)
