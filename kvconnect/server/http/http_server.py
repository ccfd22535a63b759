"""Runs uvicorn with limits for clients, and with a shutdown that waits for answers."""

from __future__ import annotations

import logging
import resource
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from kvconnect.server.admission import Admission
from kvconnect.server.http.connection import Connection
from kvconnect.server.http.listener import Listener
from kvconnect.server.settings import HttpSettings

_log = logging.getLogger(__name__)

_ABORT_S = 5.0
"""The time for answers to end once their requests are aborted."""
_OTHER_DESCRIPTORS = 256
"""The file descriptors reserved for stores, the model and refused connections."""


def _room_for(connections: int, max_outgoing: int = 0, outgoing: int = 0) -> int:
    """Returns the number of client connections that the process may have, beside outgoing ones.

    Its limit of open files is raised as far as allowed. Arguments are those of `HttpServer`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + max_outgoing + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    free = wanted if soft == resource.RLIM_INFINITY else soft - _OTHER_DESCRIPTORS
    # With few descriptors, each connection may have a request.
    room = max(free - max_outgoing, free // (1 + outgoing))
    if room < connections:
        _log.warning("of %d connections there is room for %d: ulimit -n", connections, max(1, room))
    return max(1, min(connections, room))


class HttpServer(uvicorn.Server):
    """A uvicorn server that continues to answer during a shutdown, until running requests end.

    Args:
        app: the application.
        settings: the settings of the server.
        admission: the admission of its requests.
        ready: called once clients can connect.
        max_outgoing: the most connections to other servers that all requests together have open.
        outgoing: the most connections to other servers that one request has open.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        admission: Admission,
        ready: Callable[[], None],
        *,
        max_outgoing: int = 0,
        outgoing: int = 0,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection.with_timeout(settings.client_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            # Errors of clients are answered, not logged.
            log_level=logging.INFO if _log.isEnabledFor(logging.DEBUG) else logging.ERROR,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_room_for(settings.max_connections, max_outgoing, outgoing),
            timeout_graceful_shutdown=int(_ABORT_S),
        )
        super().__init__(config)
        self._admission = admission
        self._patience_s = settings.shutdown_timeout_s
        self._ready = ready
        self._signals = 0
        self._give_up_at = float("inf")

    def answer(self, listener: Listener) -> None:
        """Answers clients of `listener` until a signal, in the main thread; blocks.

        Raises:
            ConfigurationError: another process took the port meanwhile.
        """
        listener.listen()
        self.run(sockets=list(listener.sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Counts a signal, which `on_tick` handles.

        The process ends with its command's exit status.
        """
        self._signals += 1
        if self._signals == 1:
            name = signal.Signals(sig).name
            _log.info("%s: refusing new requests, waiting for those that run", name)

    def has_failed(self) -> bool:
        """Returns whether the server cannot answer any more; called ten times a second."""
        return False

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop listening; called ten times a second."""
        await super().on_tick(counter)
        now = time.monotonic()
        failed = self.has_failed()
        if not self._admission.closed and (self._signals or failed):
            self._admission.close()
            self._give_up_at = now + self._patience_s
        if not self._admission.closed:
            return False
        if self._signals > 1:
            self._give_up_at = min(self._give_up_at, now)
        if now >= self._give_up_at:
            self._admission.abort()
            # Remaining connections have clients that do not read; they are closed.
            return self._admission.idle or now >= self._give_up_at + _ABORT_S
        return self._admission.idle
