"""The metrics of a process of another engine: their engine label and their port."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable

from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.settings import MetricsSettings
from kvconnect.prometheus import MetricsServer, serve
from kvconnect.trace import metrics

_log = logging.getLogger("kvconnect")

# Processes of one machine that may be given the same port to begin at.
_PORTS = 64


class _Shared:
    """The one metrics server of a process, for all adapters in it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: MetricsServer | None = None
        self._process = 0
        self._users = 0

    def take(self, port: int, address: str) -> None:
        with self._lock:
            if self._server is None or self._process != os.getpid():
                self._server = _first_free(port, address)
                self._process, self._users = os.getpid(), 0
                _log.info("metrics at http://%s:%d/metrics", address, self._server.port)
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            server = self._server
            if self._users or server is None or self._process != os.getpid():
                return
            self._server = None
        server.close()


_shared = _Shared()


def tell_metrics(engine: str, settings: MetricsSettings) -> Callable[[], None]:
    """Sets `engine` as this process's label, and serves metrics to Prometheus.

    An engine has several processes that get the same settings. Each listens on the first of 64
    ports that is free, and logs it.

    Args:
        engine: label of all metrics of the process from now on.
        settings: the first port, and the address.

    Returns:
        A function to call once when the adapter is closed. The last call ends the server.

    Raises:
        ConfigurationError: no port is free, or the address is none of this machine.
        MissingExtra: prometheus-client is not installed.
    """
    metrics.engine = engine
    if settings.metrics_port is None:
        return lambda: None
    _shared.take(settings.metrics_port, settings.metrics_address)
    return _shared.give_back


def _first_free(port: int, address: str) -> MetricsServer:
    ports = range(port, min(port + _PORTS, 1 << 16))
    for one in ports:
        try:
            return serve(one, address)
        except ConfigurationError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise ConfigurationError(
                    f"metrics_port={port}, metrics_address='{address}': {error.__cause__}"
                ) from error
    raise ConfigurationError(
        f"metrics_port={port}: ports {ports[0]} to {ports[-1]} of {address} are all taken"
    )
