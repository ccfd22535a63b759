"""What a process is to its peers: the same for those it connects to and those that connect."""

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
    """Seconds.

    Attributes:
        heartbeat_s: between two signs of life.
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
    """What a process is to its peers.

    Attributes:
        hello: returns what it says of itself; called for each connection, on a thread of the
            channel's, so that a transport that was rebuilt is told of. Must not block.
        deliver: takes what peers say.
        secret: shared with all peers; ``None``: loopback only.
        timing: of all its channels.
    """

    hello: Callable[[], Hello]
    deliver: Deliver
    secret: SharedSecret | None = None
    timing: Timing = field(default_factory=Timing)
