"""The topology of a store: a single server, the master that sentinels name, or a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import InvalidResponse

from kvconnect.backends.redis.client import connection_options, transport_options
from kvconnect.backends.redis.errors import explained
from kvconnect.backends.redis.settings import Address, Mode, RedisSettings
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.trace import warn_once

# The least seconds between two requests for the topology.
_REFRESH_S = 1.0
# The most seconds that calls wait for the answer, so that a frozen node does not delay the others.
_MAX_WAIT_S = 0.25


class Topology:
    """The last known map from keys to servers. In this class a single server has all keys.

    Belongs to the event loop. Subclasses override `address_of` and `discover`.

    Attributes:
        servers: the servers that hold keys.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self.servers: tuple[Address, ...] = settings.hosts
        self._stale = True
        self._due_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._closed = False

    def address_of(self, name: bytes) -> Address:
        """Returns the server that holds the key `name`."""
        return self.servers[0]

    async def discover(self) -> None:
        """Reads which server holds which keys."""

    def moved(self, slot: int, address: Address) -> None:
        """Records the answer of a server that `address` holds `slot`."""
        self.suspect()

    def suspect(self) -> None:
        """Makes the next call read the topology again, because a server failed."""
        self._stale = True

    async def open(self) -> None:
        """Reads the topology for the first time.

        Raises:
            ConfigurationError: a server answers that the settings are wrong.
            BackendUnavailable: no server answers.
        """
        await self.discover()
        self._stale = False

    async def refresh(self) -> None:
        """Reads the topology again if a server failed or a key moved.

        The last known map is used until the answer arrives.

        Raises:
            BackendUnavailable: no map is known and no server answers; or the topology is closed.
        """
        if self._closed:  # a request started now would never be cancelled
            raise BackendUnavailable(f"{self._settings}: is closed")
        if self._stale and self._asking is None and time.monotonic() >= self._due_at:
            self._asking = asyncio.create_task(self._ask_again())
        if self._asking is not None:
            timeout = _MAX_WAIT_S if self.servers else None
            await asyncio.wait({self._asking}, timeout=timeout)
        if not self.servers:
            raise BackendUnavailable(f"{self._settings}: no server is known to hold the keys")

    def close(self) -> Awaitable[None]:
        """Stops reading the topology; the returned awaitable waits for a running attempt."""
        self._closed = True
        asking = self._asking
        if asking is not None:
            asking.cancel()
        return _ended(asking)

    async def _ask_again(self) -> None:
        try:
            await self.discover()
            self._stale = False
        except (BackendUnavailable, ConfigurationError) as error:
            warn_once(f"redis.topology {self._settings}", str(error))
        finally:
            self._due_at = time.monotonic() + _REFRESH_S
            self._asking = None


class _Sentinels(Topology):
    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self.servers = ()

    def address_of(self, name: bytes) -> Address:
        if not self.servers:
            raise BackendUnavailable(f"{self._settings}: no sentinel named a master yet")
        return self.servers[0]

    async def discover(self) -> None:
        settings = self._settings
        hosts = [(host.host, host.port) for host in settings.hosts]
        options: dict[str, Any] = {
            **transport_options(settings),
            "username": settings.sentinel_username,
            "password": settings.sentinel_password,
            "retry": Retry(NoBackoff(), 0),
            "ssl": settings.tls is not None,
        }
        sentinel = Sentinel(hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        try:
            with explained(settings, str(settings)):
                host, port = await self._ask(sentinel)
            self.servers = (Address(str(host), int(port)),)
        except ConfigurationError:  # it is a ValueError
            raise
        except (LookupError, TypeError, ValueError) as error:  # redis-py parses any answer
            raise BackendUnavailable(
                f"{settings}: the sentinel's answer makes no sense: {error!r}"
            ) from error
        finally:
            await _in_full(client.aclose() for client in sentinel.sentinels)

    async def _ask(self, sentinel: Sentinel) -> tuple[str, int]:
        try:
            found: tuple[str, int] = await sentinel.discover_master(self._settings.service)
        except redis.RedisError as error:
            raise await self._why(sentinel) from error
        return found

    async def _why(self, sentinel: Sentinel) -> Exception:
        """Returns the reason why no master is found, which redis-py's own message lacks."""
        settings, service = self._settings, self._settings.service
        answers = await asyncio.gather(
            *(client.sentinel_masters() for client in sentinel.sentinels), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, redis.AuthenticationError):
                return ConfigurationError(
                    f"{settings}: {answer}; look at sentinel_user= and sentinel_password="
                )
            if isinstance(answer, redis.ResponseError) and "unknown command" in str(answer):
                return ConfigurationError(f"{settings}: is no sentinel; write redis://")
        names = {str(name) for answer in answers if isinstance(answer, dict) for name in answer}
        if service in names:
            return BackendUnavailable(f"'{service}' has no master that works")
        if names:
            known = ", ".join(sorted(names))
            return ConfigurationError(
                f"{settings}: service '{service}' is unknown there; they know {known}"
            )
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        return failures[0] if failures else BackendUnavailable("the sentinels know no service")


class _Cluster(Topology):
    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._slots: dict[int, Address] = {}
        self.servers = ()  # those of `_slots`, which every call uses

    def address_of(self, name: bytes) -> Address:
        slot = key_slot(name)
        address = self._slots.get(slot)
        if address is None:
            self.suspect()
            raise BackendUnavailable(f"{self._settings}: no node serves slot {slot}")
        return address

    def moved(self, slot: int, address: Address) -> None:
        # Fast, because it runs on the event loop for every key, and a whole node's slots may have
        # moved.
        self._slots[slot] = address
        if address not in self.servers:
            self.servers = tuple(sorted((*self.servers, address)))
        self.suspect()

    async def discover(self) -> None:
        settings = self._settings
        options = connection_options(settings)
        del options["db"]
        known = dict.fromkeys((*self.servers, *settings.hosts))
        cluster = RedisCluster(
            startup_nodes=[ClusterNode(host.host, host.port) for host in known],
            require_full_coverage=False,
            ssl=settings.tls is not None,
            **options,
        )
        cluster.set_response_callback("CLUSTER SLOTS", _sound_slots)
        try:
            with explained(settings, str(settings)):
                # Not the client's own `initialize`, which also sends COMMAND: that costs more than
                # all the rest, and not every user may send it.
                await cluster.nodes_manager.initialize()
            nodes = {slot: nodes[0] for slot, nodes in cluster.nodes_manager.slots_cache.items()}
        finally:
            manager = cluster.nodes_manager
            await _in_full(manager.aclose(which) for which in ("nodes_cache", "startup_nodes"))
        each = {node.name: node for node in nodes.values()}
        addresses = {name: Address(str(node.host), int(node.port)) for name, node in each.items()}
        self._slots = {slot: addresses[node.name] for slot, node in nodes.items()}
        self.servers = tuple(sorted(set(addresses.values())))


def topology_of(settings: RedisSettings) -> Topology:
    """Returns the topology for the mode of `settings`, without any request."""
    kinds = {Mode.SENTINEL: _Sentinels, Mode.CLUSTER: _Cluster}
    return kinds.get(settings.mode, Topology)(settings)


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        await asyncio.wait({task})


async def _in_full(closings: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all `closings`, which run to their end even if the caller is cancelled."""
    await asyncio.shield(asyncio.gather(*closings))


def _sound_slots(response: Any, **_: Any) -> Any:
    """Returns `response` to CLUSTER SLOTS if it is sound; redis-py does not check it.

    Without the check redis-py might iterate over billions of slots on the event loop. After an
    error it calls the next node.

    Raises:
        InvalidResponse: the response is no map from slots to servers.
    """
    left = REDIS_CLUSTER_HASH_SLOTS
    entries = response if isinstance(response, list) else []
    for entry in entries:
        match entry:
            case [int(first), int(last), [bytes(), int(), *_], *replicas] if (
                0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS
                and all(isinstance(one, list) and len(one) >= 2 for one in replicas)
            ):
                left -= last - first + 1
            case _:
                left = -1
        if left < 0:
            break
    if not entries or left < 0:
        raise InvalidResponse(f"{str(response)[:100]} where the cluster's slots were due")
    return response
