"""What the tests of stores share: blocks whose content is known, buffers with canaries, stores."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from redis_server import make_redis, own_redis, prefix, redis_cluster, redis_server  # noqa: F401  fixtures
from s3_server import BUCKET, S3Server

from kvconnect.backend import Access, Backend
from kvconnect.backends import open_backend
from kvconnect.backends.disk.store import DiskBackend
from kvconnect.backends.lanes import Lanes
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.s3.store import S3Backend
from kvconnect.keys import BlockKey
from kvconnect.testing import BlockMaker


class Kit(BlockMaker):
    """The blocks and buffers of the conformance kit, and stores."""

    async def stored(self, backend: Backend, keys: Sequence[BlockKey]) -> list[bool]:
        """For each of `keys` whether it can be loaded; fails if one is loaded wrong."""
        found = []
        for key in keys:
            (buffer,) = self.buffers(1)
            loaded = await backend.load([key], [buffer])
            assert not loaded or self.holds(buffer, key)
            found.append(bool(loaded))
        return found

    @asynccontextmanager
    async def opened(self, backend: Backend, access: Access = "store") -> AsyncIterator[Backend]:
        await backend.open([self.layout], access)
        try:
            yield backend
        finally:
            await backend.close()


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some, and nothing else of what this machine's user has set for AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


@pytest.fixture
def s3_server(s3_credentials: None) -> Iterator[S3Server]:
    """A service with an empty bucket."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def make_s3(s3_server: S3Server) -> Callable[..., S3Backend]:
    """Makes S3 stores in one bucket; what they remember of it is forgotten at once."""

    def make(**options: object) -> S3Backend:
        forgetful = {"lookup_ttl_s": 0.0, "miss_ttl_s": 0.0, "timeout_s": 5.0}
        place = {"bucket": BUCKET, "prefix": "kv", "endpoint_url": s3_server.endpoint}
        return S3Backend(S3Settings(**{**forgetful, **place, **options}))  # type: ignore[arg-type]

    return make


@pytest.fixture(params=["memory", "disk", "redis", "s3"])
def make_bare(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Backend]:
    """Makes a store that is not open yet; ``make_bare(capacity=…)``."""

    def make(*, capacity: int = 64 << 20) -> Backend:
        if request.param == "memory":
            return MemoryBackend(capacity)
        if request.param == "redis":  # its capacity is the server's
            server = request.getfixturevalue("redis_server")
            return open_backend(f"{server.url}?prefix={tmp_path.name}-{id(tmp_path)}:").inner
        if request.param == "s3":
            endpoint = request.getfixturevalue("s3_server").endpoint
            return S3Backend(S3Settings(bucket=BUCKET, prefix="kv", endpoint_url=endpoint))
        return DiskBackend(tmp_path / "store", capacity=capacity)

    return make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of `make_disk`, which is not there yet."""
    return tmp_path / "store"


@pytest.fixture
def make_disk(path: Path) -> Callable[..., DiskBackend]:
    """Makes disk stores in one directory."""

    def make(**options: object) -> DiskBackend:
        return DiskBackend(path, **{"capacity": 64 << 20, **options})  # type: ignore[arg-type]

    return make


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    """What a part of a disk store needs of its threads."""
    lanes = Lanes("kvconnect-disk", loads=1, saves=1)
    yield lanes
    lanes.end()
    lanes.join()


@pytest.fixture
def only_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int], AbstractContextManager[None]]:
    """Lets so many threads start within a ``with`` block; demands that they end after it."""

    @contextmanager
    def limited(there_are: int) -> Iterator[None]:
        started: list[threading.Thread] = []
        begin = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if len(started) == there_are:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            begin(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            yield
        for thread in started:
            thread.join(60)
            assert not thread.is_alive()

    return limited
