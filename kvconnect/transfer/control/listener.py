"""The listening end of control channels."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from contextlib import suppress
from typing import Self

from kvconnect.address import host_and_port
from kvconnect.errors import BadMessage, ConfigurationError, PeerRefused
from kvconnect.trace import count, warn_once
from kvconnect.transfer.control.channel import Channel
from kvconnect.transfer.control.endpoint import Endpoint
from kvconnect.transfer.control.handshake import OPENING_LIMIT, shake_hands
from kvconnect.transfer.control.wire import Wire, WireClosed, WireTimeout
from kvconnect.transfer.places import host_of, least_useful, oldest
from kvconnect.transfer.secret import require_secret

__all__ = ["Listener"]

logger = logging.getLogger("kvconnect")

_MAX_HALF_OPEN = 32
_MAX_CHANNELS = 256
_PAUSE_S = 0.1
"""After an attempt to accept that failed: descriptors or memory may be short for a moment."""


class Listener:
    """Accepts peers. Each channel has two threads of its own.

    At most 32 connections are in the opening. One more replaces the oldest, so that connections
    that never finish their opening keep no peer out. At most 256 channels are open. One more
    replaces the `least_useful`, so that peers without a lease cannot keep out, or replace, a peer
    with one. A peer that connects again replaces its earlier channel.

    Args:
        endpoint: the settings of all channels.
        host: where to listen; beyond loopback only with a secret.
        port: 0: any that is free.

    Attributes:
        host, port: where it listens.

    Raises:
        ConfigurationError: no secret; the port is taken, the address not this machine's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_channels: int = _MAX_CHANNELS,
    ) -> None:
        require_secret("host", host, endpoint.secret)
        self._endpoint = endpoint
        self._max_channels = max_channels
        self._sock = _listening(host, port)
        self.host: str = host
        self.port: int = self._sock.getsockname()[1]
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._opening: dict[Wire, None] = {}
        self._channels: dict[tuple[str, int], Channel] = {}
        self._threads: set[threading.Thread] = set()
        self._accepting = threading.Thread(
            target=self._accept, name="kvconnect-control-accept", daemon=True
        )
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, advertise: str | None) -> str:
        """Returns the ``host:port`` that peers connect to; `advertise` replaces host or both."""
        host, port = self.host, self.port
        if advertise is not None:
            host, given = host_and_port(advertise)
            port = given or port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def channels(self) -> list[Channel]:
        """Returns the open channels."""
        with self._lock:
            return list(self._channels.values())

    def close(self, timeout_s: float = 5.0) -> None:
        """Accepts no more and closes all channels. Blocks until they have ended, or `timeout_s`."""
        with self._lock:
            self._closed.set()
            opening, channels = list(self._opening), list(self._channels.values())
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends accept()
        for wire in opening:
            wire.shut()
        for channel in channels:
            channel.close("the peer is shutting down")
        for channel in channels:
            channel.join(timeout_s)
        self._accepting.join(timeout_s)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout_s)
        self._sock.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, (address, *_) = self._sock.accept()
            except OSError as error:
                if not self._closed.is_set():
                    warn_once("control accept", f"control channel: cannot accept: {error}")
                    self._closed.wait(_PAUSE_S)
                continue
            silence_s, host = self._endpoint.timing.silence_s, host_of(address)
            wire = Wire(sock, limit=OPENING_LIMIT, silence_s=silence_s, host=host)
            if not self._admit(wire):
                wire.close()

    def _admit(self, wire: Wire) -> bool:
        thread = threading.Thread(
            target=self._serve, args=(wire,), name="kvconnect-control-read", daemon=True
        )
        with self._lock:
            if self._closed.is_set():
                return False
            if len(self._opening) >= _MAX_HALF_OPEN:
                count("transfer.control.pushed_out")
                pushed_out = oldest(list(self._opening))
                del self._opening[pushed_out]
                pushed_out.shut()
            self._opening[wire] = None
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:
            warn_once("control threads", f"control channel: {error}; allow more threads")
            with self._lock:
                self._opening.pop(wire, None)
                self._threads.discard(thread)
            return False
        return True

    def _serve(self, wire: Wire) -> None:
        try:
            channel = self._open(wire)
            if channel is not None:
                self._run(channel)
        finally:
            wire.close()
            with self._lock:
                self._opening.pop(wire, None)
                self._threads.discard(threading.current_thread())

    def _open(self, wire: Wire) -> Channel | None:
        try:
            hello = shake_hands(wire, self._endpoint, initiator=False)
        except PeerRefused as error:
            count("transfer.control.refused")
            warn_once(f"refused {error}"[:500], f"a peer was refused: {error}")
            return None
        except (BadMessage, WireClosed, WireTimeout) as error:
            count("transfer.control.not_opened")
            logger.debug("control channel: a connection was not opened: %s", error)
            return None
        channel = Channel(wire, self._endpoint, hello)
        key = (hello.engine_id, hello.rank)
        reason = "the peer connected anew"
        with self._lock:
            if self._closed.is_set() or wire not in self._opening:
                return None
            del self._opening[wire]
            earlier = self._channels.pop(key, None)
            if earlier is None and len(self._channels) >= self._max_channels:
                count("transfer.control.pushed_out")
                reason = f"another peer took its place: {self._max_channels} are connected"
                earlier = least_useful(list(self._channels.values()))
                del self._channels[earlier.peer.engine_id, earlier.peer.rank]
            self._channels[key] = channel
        if earlier is not None:
            earlier.cut(reason)
        return channel

    def _run(self, channel: Channel) -> None:
        try:
            channel.run()
        except RuntimeError as error:
            warn_once("control threads", f"control channel: {error}; allow more threads")
        finally:
            key = (channel.peer.engine_id, channel.peer.rank)
            with self._lock:
                if self._channels.get(key) is channel:
                    del self._channels[key]


def _listening(host: str, port: int) -> socket.socket:
    where = f"{host}:{port}"
    if not 0 <= port < 1 << 16:
        raise ConfigurationError(f"port: {port} must be 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port: {where} is taken by another process; choose another, or 0 for any"
            ) from error
        raise ConfigurationError(
            f"host: cannot listen at {where}: {error.strerror or error}"
        ) from error
