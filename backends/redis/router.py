"""The router of work on many keys: sends it to their servers in parallel, and follows redirects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from kvconnect.backends.lanes import results_of
from kvconnect.backends.redis.client import Kind, RedisNode
from kvconnect.backends.redis.commands import Ask, Put, Redirect, Want, ask, look, sound
from kvconnect.backends.redis.errors import explained
from kvconnect.backends.redis.format import Names
from kvconnect.backends.redis.server import check_server
from kvconnect.backends.redis.settings import Address, RedisSettings
from kvconnect.backends.redis.topology import topology_of
from kvconnect.backends.redis.wire import Reply, Wire
from kvconnect.errors import BackendUnavailable, ConfigurationError

# The bytes of values below which a second connection does not pay, because a server has one thread.
_STRIPE_NBYTES = 32 << 20
_MAX_REDIRECTS = 5
# The most new servers in one call, each with threads of its own. If more have changed, the next
# call reads the topology first.
_MAX_REDIRECTED_TO = 32


Item: TypeAlias = Ask | Want | Put

A = TypeVar("A")
R = TypeVar("R")


_Target: TypeAlias = tuple[Address, bool]
"""The server to call, and true if only for this call because the key is being moved there."""


class RedisRouter:
    """The servers of one store. Belongs to the event loop.

    Attributes:
        settings: the settings of the store.
        names: the names of blocks.
        topology: the servers that hold keys.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self.names = Names(settings.prefix.encode())
        self.topology = topology_of(settings)
        self._nodes: dict[Address, RedisNode] = {}
        self._closed = self._was_open = False

    async def open(self) -> None:
        """Finds the servers, and checks that each of them accepts the commands of this store.

        Errors of later calls are never configuration errors, because the settings worked once.

        Raises:
            ConfigurationError: a server answered, and the settings are wrong for it.
            BackendUnavailable: a server was not reached. No connection is left open.
        """
        try:
            await self.topology.open()
            await self.everywhere(partial(check_server, self.settings, self.names))
        except BaseException:
            await self.close()
            raise
        self._was_open = True

    async def refresh(self) -> None:
        """Reads the topology again if it is in doubt; closes servers that hold no keys."""
        await self.topology.refresh()
        for address in set(self._nodes) - set(self.topology.servers):
            if self._nodes[address].idle:
                await self._nodes.pop(address).close()

    async def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        """Returns the answers to small commands, in order; errors are answers."""
        return await self.run(ask, asks, "ask")

    async def answers(self, asks: Sequence[Ask]) -> list[Reply]:
        """Returns the answers as `ask` does.

        Raises:
            BackendUnavailable: one of them is an error.
        """
        return [sound(reply) for reply in await self.ask(asks)]

    async def look(self, asks: Sequence[Ask]) -> list[Reply]:
        """Returns the answers as `ask` does, without marking the values as used (Redis 7.2)."""
        return await self.run(look, asks, "ask")

    async def run(
        self, work: Callable[..., Sequence[A | Redirect]], items: Sequence[Item], kind: Kind
    ) -> list[A]:
        """Returns the answers of `work` to `items`, in order; each server gets its own items.

        Ends only when no thread uses the buffers of `items`, even if it fails or is cancelled.

        Raises:
            BackendUnavailable: a server failed; the others have done their part.
        """
        if not items:
            return []
        await self.refresh()
        answers: list[Any] = [None] * len(items)
        groups = self._group(items)
        for _ in range(_MAX_REDIRECTS):
            jobs = [
                (target, numbers)
                for target, group in groups.items()
                for numbers in self._stripes(items, group)
            ]
            calls = [
                self._do(work, [items[n] for n in numbers], target, kind)
                for target, numbers in jobs
            ]
            results = await all_ended(calls)
            groups = {}
            for (_, numbers), found in zip(jobs, results, strict=True):
                for number, answer in zip(numbers, found, strict=True):
                    if isinstance(answer, Redirect):
                        groups.setdefault(self._follow(answer), []).append(number)
                    else:
                        answers[number] = answer
            if not groups:
                return answers
            if len(groups) > _MAX_REDIRECTED_TO:
                raise BackendUnavailable(f"{self.settings}: sent to {len(groups)} others at once")
        raise BackendUnavailable(f"{self.settings}: sent from one server to another without end")

    def _group(self, items: Sequence[Item]) -> dict[_Target, list[int]]:
        servers = self.topology.servers
        if len(servers) == 1:
            return {(servers[0], False): list(range(len(items)))}
        groups: dict[_Target, list[int]] = {}
        for number, item in enumerate(items):
            groups.setdefault((self.topology.address_of(item.name), False), []).append(number)
        return groups

    async def _do(
        self, work: Callable[..., R], items: Sequence[Item], target: _Target, kind: Kind
    ) -> R:
        address, asking = target
        return await self.on(address, lambda wire: work(wire, items, asking=asking), kind)

    def _follow(self, redirect: Redirect) -> _Target:
        if not redirect.asking:
            self.topology.moved(redirect.slot, redirect.address)
        return redirect.address, redirect.asking

    async def on(self, address: Address, work: Callable[[Wire], R], kind: Kind = "ask") -> R:
        """Returns the result of `work` on a connection to one server."""
        if self._closed:
            raise BackendUnavailable(f"{self.settings}: is closed")
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = RedisNode(address, self.settings)
        try:
            with explained(self.settings, address):
                return await node.run(work, kind)
        except BackendUnavailable:
            self.topology.suspect()
            raise
        except ConfigurationError as error:
            if self._was_open:
                raise BackendUnavailable(str(error)) from error
            raise

    async def everywhere(self, work: Callable[[Wire], R]) -> list[R]:
        """Returns the results of `work` on all servers. Raises only once all have ended."""
        return await all_ended([self.on(server, work) for server in self.topology.servers])

    async def close(self) -> None:
        """Ends all connections; calls in flight fail."""
        self._closed = True
        nodes = list(self._nodes.values())
        self._nodes.clear()
        await asyncio.gather(self.topology.close(), *(node.close() for node in nodes))

    def _stripes(self, items: Sequence[Item], numbers: list[int]) -> list[list[int]]:
        moved = (items[number] for number in numbers)
        nbytes = sum(0 if isinstance(item, Ask) else item.nbytes for item in moved)
        count = max(1, min(self.settings.connections, nbytes // _STRIPE_NBYTES, len(numbers)))
        size = -(-len(numbers) // count)
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]


async def all_ended(calls: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Returns all results; raises only once all have ended, since they use the caller's buffers."""
    if len(calls) == 1:
        return [await calls[0]]
    return results_of(await asyncio.gather(*calls, return_exceptions=True))
