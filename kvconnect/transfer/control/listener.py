"""The listening end of control channels."""

from __future__ import annotations

import logging
import socket
from typing import Self

from kvconnect.address import host_and_port
from kvconnect.errors import BadMessage, PeerRefused
from kvconnect.trace import count, warn_once
from kvconnect.transfer.acceptor import Acceptor
from kvconnect.transfer.control.channel import Channel
from kvconnect.transfer.control.endpoint import Endpoint
from kvconnect.transfer.control.handshake import OPENING_LIMIT, shake_hands
from kvconnect.transfer.control.wire import Wire, WireClosed, WireTimeout
from kvconnect.transfer.secret import require_secret

logger = logging.getLogger("kvconnect")


class Listener(Acceptor[Channel]):
    """Accepts peers. Each channel has two threads of its own.

    A peer that connects again replaces its earlier channel. For `least_useful`, a channel is used
    when a lease is granted over it.

    Args:
        endpoint: the settings of all channels.
        host: where to listen; beyond loopback only with a secret.
        port: the port to listen on; 0 is any that is free.

    Raises:
        ConfigurationError: `host` is beyond loopback without a secret, the port is taken, or the
            address is not this machine's.
    """

    def __init__(self, endpoint: Endpoint, host: str = "127.0.0.1", port: int = 0) -> None:
        require_secret("host", host, endpoint.secret)
        self._endpoint = endpoint
        super().__init__("control", host, port)

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
            return list(self._admitted.values())

    def close(self, timeout_s: float | None = 5.0) -> None:
        """Accepts no more and closes all channels. Blocks until they have ended, or `timeout_s`."""
        super().close(timeout_s)

    def _key(self, admitted: Channel) -> tuple[str, int]:
        return admitted.peer.engine_id, admitted.peer.rank

    def _open(self, sock: socket.socket, host: str) -> Channel | None:
        wire = Wire(sock, limit=OPENING_LIMIT, silence_s=self._endpoint.timing.silence_s)
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
        return Channel(wire, self._endpoint, hello, host)

    def _serve(self, admitted: Channel) -> None:
        try:
            admitted.run()
        except RuntimeError as error:
            warn_once("control threads", f"control channel: {error}; allow more threads")
