"""The events of channels, and the callable that receives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvconnect.transfer.control.messages import Hello, Message


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
