"""A peer that this process connects to, again after each failure."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from kvconnect.errors import BadMessage, ConfigurationError, PeerRefused
from kvconnect.text import shown
from kvconnect.trace import count
from kvconnect.transfer.control.channel import Channel
from kvconnect.transfer.control.endpoint import Endpoint
from kvconnect.transfer.control.handshake import OPENING_LIMIT, shake_hands
from kvconnect.transfer.control.wire import Wire, WireClosed, WireTimeout
from kvconnect.transfer.secret import require_secret

logger = logging.getLogger("kvconnect")


class Peer:
    """Keeps a channel to one address open, in a thread of its own.

    After a failure it tries again: first soon, then after pauses that double, as long as the peer
    is needed. `Connected` and `Disconnected` reach ``endpoint.deliver`` when messages can or cannot
    be sent. Each `Connected` may be of another incarnation of the peer.

    Args:
        endpoint: the settings of the channel.
        host, port: where the peer's `Listener` is; beyond loopback only with a secret.
        longest_pause_s: called before each pause; returns its limit in seconds. ``None`` ends the
            attempts for good, as `close` does: the peer is not needed any more. Must not block. The
            default is ``last_pause_s`` of the endpoint.

    Attributes:
        error: the error of the last attempt to connect; ``None`` if it succeeded or there was none
            yet. A `PeerRefused` names the setting to change; attempts continue nevertheless, since
            the peer may restart with other settings.
        attempts: the number of attempts to connect.

    Raises:
        ConfigurationError: there is no secret.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        host: str,
        port: int,
        *,
        longest_pause_s: Callable[[], float | None] | None = None,
    ) -> None:
        require_secret("host", host, endpoint.secret)
        self.host = host
        self.port = port
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._longest_pause_s = longest_pause_s or (lambda: endpoint.timing.last_pause_s)
        self._closed = threading.Event()
        self._hurried = threading.Event()  # or closed
        self._wire: Wire | None = None
        self._channel: Channel | None = None
        self.error: Exception | None = None
        self.attempts = 0
        self._thread = threading.Thread(target=self._run, name="kvconnect-control", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Peer({self.host}:{self.port}, {self._channel or self.error or 'connecting'})"

    @property
    def channel(self) -> Channel | None:
        """The open channel; ``None`` if there is none now."""
        channel = self._channel
        return channel if channel is not None and channel.is_open else None

    def reconnect(self, reason: str = "connecting anew") -> None:
        """Closes the channel, if there is one, and connects again soon. Does not block.

        Both sides then send `Hello` again, which is needed after a transport was rebuilt.
        """
        channel = self._channel
        if channel is not None:
            channel.close(reason)

    def hurry(self) -> None:
        """Ends the pause before the next attempt, if there is one; does not block."""
        self._hurried.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Closes the channel and connects no more. Blocks until that is done, or `timeout_s`.

        On the channel's own thread it does not block.
        """
        with self._lock:
            self._closed.set()
            self._hurried.set()
            channel, wire = self._channel, self._wire
        if channel is not None:
            channel.close()
        elif wire is not None:
            wire.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        timing = self._endpoint.timing
        pause_s = timing.first_pause_s
        while not self._closed.is_set():
            began = time.monotonic()
            opened = self._attempt()
            # A channel that closes soon after it opened is not opened again at once.
            if opened and time.monotonic() - began > timing.last_pause_s:
                pause_s = timing.first_pause_s
            longest_s = self._longest_pause_s()
            if longest_s is None:
                self._closed.set()
                return
            if self._hurried.wait(min(pause_s, longest_s) * random.uniform(0.75, 1.25)):
                pause_s = timing.first_pause_s
                self._hurried.clear()
            else:
                pause_s = min(2 * pause_s, longest_s)

    def _attempt(self) -> bool:
        """Connects and runs the channel until it closes; returns whether it was open."""
        self.attempts += 1
        try:
            channel = self._connect()
        except (PeerRefused, BadMessage, WireClosed, WireTimeout, OSError) as error:
            self._failed(error)
            return False
        except ValueError as error:  # for an invalid host name: UnicodeError, a null character
            self._failed(ConfigurationError(f"host: {shown(self.host)} is no host name: {error}"))
            return False
        if channel is None:
            return False
        try:
            channel.run()
        except RuntimeError as error:
            self._failed(error)
        finally:
            with self._lock:
                self._channel = self._wire = None
        logger.info("control channel to %s:%d: %s", self.host, self.port, channel.reason)
        return True

    def _connect(self) -> Channel | None:
        timing = self._endpoint.timing
        sock = socket.create_connection((self.host, self.port), timing.handshake_s)
        wire = Wire(sock, limit=OPENING_LIMIT, silence_s=timing.silence_s)
        with self._lock:
            self._wire = wire
        opened = False
        try:
            if self._closed.is_set():
                return None
            channel = Channel(
                wire, self._endpoint, shake_hands(wire, self._endpoint, initiator=True)
            )
            opened = True
        finally:
            if not opened:
                with self._lock:
                    self._wire = None
                wire.close()
        with self._lock:
            self._channel = channel
            self.error = None
            if self._closed.is_set():
                channel.close()
        return channel

    def _failed(self, error: Exception) -> None:
        count("transfer.control.not_connected")
        changed = str(error) != str(self.error)
        with self._lock:
            self.error = error
        logger.log(
            logging.WARNING if changed else logging.DEBUG,
            "control channel to %s:%d: %s",
            self.host,
            self.port,
            error,
        )
