"""The settings of a process's channels, the same for incoming and outgoing connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.errors import ConfigurationError
from kvconnect.transfer.control.events import Deliver
from kvconnect.transfer.control.messages import Hello
from kvconnect.transfer.secret import SharedSecret

__all__ = ["Endpoint", "Timing"]


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a control channel, in seconds.

    Attributes:
        heartbeat_s: the time between two heartbeats.
        silence_s: a peer that gives none for so long is dead. The default leaves room for a peer
            whose interpreter is busy for a while.
        handshake_s: the whole opening of a connection, at most.
        first_pause_s, last_pause_s: between attempts to connect; doubles from one to the other.
    """

    heartbeat_s: float = 0.5
    silence_s: float = 2.5
    handshake_s: float = 3.0
    first_pause_s: float = 0.1
    last_pause_s: float = 2.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}: {getattr(self, name)!r} must be greater than 0")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigurationError(
                f"silence_s: {self.silence_s} must be at least twice heartbeat_s, "
                f"{self.heartbeat_s}"
            )
        if self.last_pause_s < self.first_pause_s:
            raise ConfigurationError(
                f"last_pause_s: {self.last_pause_s} must be at least first_pause_s, "
                f"{self.first_pause_s}"
            )


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
