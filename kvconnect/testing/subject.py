"""The access to a backend under test: makes it, and reads and writes its medium directly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

from kvconnect.backend import Backend, Capabilities, StoredBlock
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.registry import open_backend
from kvconnect.keys import BlockKey
from kvconnect.testing.blocks import BlockMaker
from kvconnect.testing.faults.clock import ShiftedClock

StoreT = TypeVar("StoreT", bound=Backend)


class Unsupported(Exception):
    """The error that a check does not apply to the subject; names the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes of a medium: as the backend reports, and as measured."""

    claimed: float
    found: float


@asynccontextmanager
async def open_while(store: StoreT) -> AsyncIterator[StoreT]:
    """Opens `store` for the blocks of `BlockMaker`; closes it at the end."""
    await store.open([BlockMaker.layout])
    try:
        yield store
    finally:
        await store.close()


class Subject(ABC):
    """The kit's access to a backend. Only `make_backend` has to be written.

    Checks that need another method are skipped until it is overridden, with a sentence that names
    it. Other checks are chosen by the backend's `capabilities`.

    Attributes:
        seed: the random seed.
        long: true for the long form, such as 200 kills instead of 20.
        random_runs: the runs of the group ``model``, of 25 operations each; ten times as many in
            the long form.
        ttl_s: the time to live for `make_expiring`; ``None``: a minute. Make it short if
            `pass_time` has to wait.
        ranks: tensor-parallel ranks of engines; each of several ranks opens the store by
            `store_url`.
        deadline_s: the deadline of calls while the network fails.
        patience_s: seconds after which a call of the bare backend counts as hanging.
        directory: the directory of the store's files; ``None``: it has none. Enables the checks
            that make a disk fail.
        address: the address of the store's server; enables the checks of a failing network.
        opens_once: true if a process can open the medium only once, as with LMDB.
        keeps_copies: true if a `shared` store may find blocks for a while that another process has
            deleted.
        ends_cancelled: true if a cancelled load ends only once no write to its buffers can follow.
            The framework cancels no load, so that a backend need not do this.
        kill_points: names that the backend passes to the function that `arm` sets.
        skip: ids or groups of skipped checks, each with its reason.
        tidy: true to call `clean` after each check, because the medium outlives the run.
    """

    seed: int = 0
    long: bool = False
    random_runs: int = 30
    ttl_s: float | None = None
    ranks: int = 1
    patience_s: float = 10.0
    deadline_s: float = 0.7
    directory: Path | None = None
    address: Address | None = None
    opens_once: bool = False
    keeps_copies: bool = False
    ends_cancelled: bool = False
    kill_points: ClassVar[Sequence[str]] = ()
    skip: ClassVar[Mapping[str, str]] = {}
    tidy: ClassVar[bool] = False
    _makers: tuple[BlockMaker, ...] = ()

    @abstractmethod
    def make_backend(self) -> Backend:
        """Makes an unopened backend, always on the same medium."""

    def make_small(self, capacity: int) -> Backend:
        """Makes a backend on an empty medium that holds at most `capacity` bytes."""
        raise Unsupported("make_small() is not written: it makes a bounded store")

    def make_expiring(self, ttl_s: float) -> Backend:
        """Makes a backend whose blocks expire after `ttl_s`."""
        raise Unsupported("make_expiring() is not written: it makes a store with a TTL")

    def make_via(self, address: Address) -> Backend:
        """Makes a backend that uses `address`, which forwards to `self.address`."""
        raise Unsupported("make_via() is not written: it makes a store behind a proxy")

    def store_url(self) -> str:
        """Returns the URL by which other processes open the same medium."""
        raise Unsupported("store_url() is not written: other ranks open the store by it")

    def store_url_via(self, address: Address) -> str:
        """Returns the URL with `address` in place of the server's address, as in `make_via`."""
        raise Unsupported("store_url_via() is not written: it leads through a proxy")

    def make_in(self, directory: Path) -> Backend:
        """Makes a backend with its files in `directory`, which need not exist."""
        raise Unsupported("make_in() is not written: it makes a store in a given directory")

    def make_guarded(self, deadline_s: float) -> GuardedBackend:
        """Makes the backend with the framework's guard around it."""
        return open_backend(self.make_backend(), deadline_s=deadline_s)

    async def peek(self, backend: Backend, key: BlockKey) -> bytes | None:
        """Returns the stored bytes of `key`, read directly from the medium if possible.

        The default loads, by the public method, a value that is as long as a frame.
        """
        into = self.blocks().buffer(BlockMaker.frame_nbytes)
        return bytes(into.numpy().data) if await backend.load([key], [into]) else None

    async def poke(self, backend: Backend, key: BlockKey, data: bytes) -> None:
        """Replaces the stored bytes of `key`. The default uses the public methods."""
        await backend.delete([key])
        value = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        await backend.save([StoredBlock(key, value.to(torch.uint8))])

    async def corrupt(self, backend: Backend, key: BlockKey, at: int, change: int = 1) -> None:
        """Flips the bits `change` of the stored byte `at` of `key`."""
        data = bytearray(await self.peek(backend, key) or b"")
        if len(data) <= at:
            raise Unsupported(f"peek() found {len(data)} bytes of a block that was saved")
        data[at] ^= change
        await self.poke(backend, key, bytes(data))

    async def usage(self, backend: Backend) -> Usage:
        """Returns the bytes that `backend` reports, and those measured on the medium."""
        raise Unsupported("usage() is not written: it measures the medium")

    async def pass_time(self, clock: ShiftedClock, seconds: float) -> None:
        """Advances the store's time by `seconds`.

        Without a server, shifting Python's clock suffices.
        """
        clock.forward(seconds)

    async def restart_server(self, *, empty: bool) -> None:
        """Stops the server, by force if necessary, and starts it again at the same address."""
        raise Unsupported("restart_server() is not written")

    def arm(self, backend: Backend, at: Callable[[str], None]) -> None:
        """Makes `backend` call `at` on reaching each of `kill_points`."""

    # ------------------------------------------------------------------------ for the checks

    def blocks(self, *parts: object) -> BlockMaker:
        """Returns a maker of blocks whose keys no other check uses."""
        maker = BlockMaker((self.seed, *parts))
        if self.tidy:
            self._makers = (*self._makers, maker)
        return maker

    async def clean(self) -> None:
        """Deletes the blocks that the checks so far have saved."""
        keys = [key for maker in self._makers for key in maker.named]
        self._makers = ()
        if keys:
            async with self.opened() as store:
                for start in range(0, len(keys), 256):
                    await store.delete(keys[start : start + 256])

    def capabilities(self) -> Capabilities:
        """Returns the declared capabilities of a backend."""
        return self.bare(self.make_backend()).capabilities

    def bare(self, backend: Backend) -> Backend:
        """Returns `backend` without the framework's guard."""
        return backend.inner if isinstance(backend, GuardedBackend) else backend

    def opened(self, backend: Backend | None = None) -> AbstractAsyncContextManager[Backend]:
        """Opens the bare backend; the context closes it at the end."""
        return open_while(self.bare(backend or self.make_backend()))

    @asynccontextmanager
    async def prepared(
        self,
        name: str,
        count: int,
        *,
        slots: int | None = None,
        backend: Backend | None = None,
    ) -> AsyncIterator[tuple[Backend, BlockMaker, list[BlockKey]]]:
        """Opens a bare backend, with a maker of blocks and `count` keys that only `name` uses.

        Args:
            name: the name of the check.
            count: the number of keys.
            slots: the blocks that the backend has to hold at most; ``None``: no limit.
            backend: the backend, if it is not one of `make_backend` or `make_small`.
        """
        blocks = self.blocks(name)
        if slots is not None:
            backend = self.make_small(slots * blocks.frame_nbytes)
        async with self.opened(backend) as store:
            yield store, blocks, blocks.keys(count=count)

    def guarded(
        self, deadline_s: float = 10.0, backend: Backend | None = None
    ) -> AbstractAsyncContextManager[GuardedBackend]:
        """Opens the guarded backend; the context closes it at the end."""
        if backend is None:
            return open_while(self.make_guarded(deadline_s))
        return open_while(open_backend(backend, deadline_s=deadline_s))

    def require(self, capability: str) -> None:
        """Skips the check unless the backend declares `capability`.

        Raises:
            Unsupported: the backend does not declare it.
        """
        if not getattr(self.capabilities(), capability):
            raise Unsupported(f"the backend does not declare `{capability}`")
