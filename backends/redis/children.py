"""Which blocks follow a block: an index beside them, for partial blocks at a prompt's end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvconnect.backend import MAX_CHILDREN, Child, StoredBlock
from kvconnect.backends.entries import child_from_bytes, child_to_bytes
from kvconnect.backends.redis.commands import Ask, command, sound
from kvconnect.backends.redis.find import RedisFinder
from kvconnect.backends.redis.format import Head
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.settings import RedisSettings
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey
from kvconnect.trace import warn_once

__all__ = ["RedisChildren"]

_TTL_S = 30 * 86400.0
_SLACK_S = 60.0


class RedisChildren:
    """One sorted set per parent: the newest `MAX_CHILDREN` blocks, by the time they were saved.

    It may name blocks that are gone, which `children` finds out, and lack some that are there: an
    index that was evicted comes back as blocks are saved again.
    """

    def __init__(self, settings: RedisSettings, router: RedisRouter, finder: RedisFinder) -> None:
        self._router = router
        self._finder = finder
        ttl_s = _TTL_S if settings.ttl is None else settings.ttl + _SLACK_S
        self._ttl_ms = round(1e3 * ttl_s)

    async def add(self, blocks: Sequence[StoredBlock]) -> None:
        """Lists those of `blocks` whose tokens are known. A server that fails is warned of once."""
        asks = []
        for block in blocks:
            if block.tokens is None:
                continue
            name = self._finder.names.children(block.parent)
            member = child_to_bytes(Child(block.key, block.tokens))
            asks += [
                Ask(name, command(b"ZADD", name, repr(time.time()), member)),
                Ask(name, command(b"ZREMRANGEBYRANK", name, 0, -MAX_CHILDREN - 1)),
                Ask(name, command(b"PEXPIRE", name, self._ttl_ms)),
            ]
        try:
            for reply in await self._router.ask(asks):
                sound(reply)
        except BackendUnavailable as error:
            # The blocks are found by their keys nevertheless.
            warn_once("redis.children", f"blocks are stored without the index of tails: {error}")

    async def get(self, parent: BlockKey | None) -> list[Child]:
        """Returns the listed blocks that are there, newest first."""
        name = self._finder.names.children(parent)
        found = Ask(name, command(b"ZREVRANGE", name, 0, MAX_CHILDREN - 1))
        (members,) = await self._router.ask([found])
        members = sound(members)
        if not isinstance(members, list):
            raise BackendUnavailable(f"Redis: {members!r} where a list was due")
        listed = [(member, child) for member in members if (child := child_from_bytes(member))]
        states = await self._finder.states([child.key for _, child in listed])
        pairs = list(zip(listed, states, strict=True))
        gone = [member for (member, _), state in pairs if not isinstance(state, Head)]
        if gone:
            await self._router.ask([Ask(name, command(b"ZREM", name, *gone))])
        return [child for (_, child), state in pairs if isinstance(state, Head)]
