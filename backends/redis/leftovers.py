"""The remains of dropped blocks in Redis: tokens in the lists of children, and parts.

A server that drops a block's first value, by eviction or TTL, keeps the block's other values, and
the entry in its parent's sorted set.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

from kvconnect.backends.entries import child_from_bytes
from kvconnect.backends.redis.commands import about, of_another_type, sound, state_of
from kvconnect.backends.redis.format import HEAD_NBYTES, Head
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.server import scan
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import KEY_NBYTES, BlockKey

_NO_EXPIRY = -1  # the PTTL of a value without expiry


class RedisLeftovers:
    """Removes remains of dropped blocks, a page of names at a time. Belongs to the event loop."""

    def __init__(self, router: RedisRouter) -> None:
        self._router = router
        self._names = router.names
        self._pages: AsyncIterator[None] | None = None

    async def remove_some(self) -> bool:
        """Cleans the next page; returns whether more may be left.

        Raises:
            BackendUnavailable: a server fails, or its listing does not end. The next call begins
                anew.
        """
        pages = self._pages or self._each_page()
        self._pages = None
        try:
            await anext(pages)
        except StopAsyncIteration:
            return False
        self._pages = pages
        return True

    async def _each_page(self) -> AsyncIterator[None]:
        await self._router.refresh()
        for server in self._router.topology.servers:
            for stem, remove in ((b"c:", self._unlist), (b"p:", self._drop_parts)):
                cursor, given = 0, set[int]()
                while True:
                    step = partial(scan, self._names.prefix + stem, cursor)
                    cursor, found = await self._router.on(server, step)
                    if cursor in given:
                        raise BackendUnavailable(f"Redis at {server}: its listing does not end")
                    given.add(cursor)
                    await remove(found)
                    yield
                    if cursor == 0:
                        break

    async def _unlist(self, names: Sequence[bytes]) -> None:
        """Removes absent blocks from lists of children."""
        lists = await self._router.look([about(b"ZRANGE", name, 0, -1) for name in names])
        listed = [
            (name, member, child.key)
            for name, reply in zip(names, lists, strict=True)
            if not of_another_type(reply) and isinstance(members := sound(reply), list)
            for member in members
            if isinstance(member, bytes) and (child := child_from_bytes(member)) is not None
        ]
        heads = await self._heads([key for _, _, key in listed])
        gone: dict[bytes, list[bytes]] = {}
        for (name, member, _), head in zip(listed, heads, strict=True):
            if head is None:
                gone.setdefault(name, []).append(member)
        await self._router.answers(
            [about(b"ZREM", name, *members) for name, members in gone.items()]
        )

    async def _drop_parts(self, names: Sequence[bytes]) -> None:
        """Deletes parts that no block refers to, except those of a running write, which expire."""
        ends = await self._router.look([about(b"PTTL", name) for name in names])
        # In this order, because a writer removes the parts' expiry once a block refers to them.
        ours = [
            (name, *owner)
            for name, end in zip(names, ends, strict=True)
            if sound(end) == _NO_EXPIRY and (owner := self._owner(name)) is not None
        ]
        heads = await self._heads([key for _, key, _ in ours])
        stale = [
            name
            for (name, _, nonce), head in zip(ours, heads, strict=True)
            if head is None or head.nonce != nonce
        ]
        await self._router.answers([about(b"UNLINK", name) for name in stale])

    async def _heads(self, keys: Sequence[BlockKey]) -> list[Head | None]:
        asks = [about(b"GETRANGE", self._names.block(key), 0, HEAD_NBYTES - 1) for key in keys]
        replies = await self._router.look(asks)
        # An error is no answer that a block is gone: what belongs to it must stay.
        states = map(state_of, replies)
        return [one if isinstance(one, Head) else None for one in states]

    def _owner(self, name: bytes) -> tuple[BlockKey, bytes] | None:
        """Returns the block and the nonce in the name of a part."""
        pieces = name.removeprefix(self._names.prefix + b"p:").split(b":")
        try:
            key, nonce = (bytes.fromhex(piece.decode("ascii")) for piece in pieces[:2])
        except ValueError:
            return None
        return (BlockKey(key), nonce) if len(key) == KEY_NBYTES else None
