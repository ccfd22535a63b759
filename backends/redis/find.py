"""The search, listing and deletion of blocks in Redis, each of which has one value or several.

It also keeps an index of the blocks that follow a block, for partial blocks at a prompt's end.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from kvconnect.backend import MAX_CHILDREN, Child, StoredBlock, StoredEntry
from kvconnect.backends.entries import BlockMetadata, child_from_bytes, child_to_bytes
from kvconnect.backends.redis.commands import (
    Ask,
    Outcome,
    about,
    command,
    head_command,
    of_another_type,
    sound,
    state_of,
)
from kvconnect.backends.redis.format import HEAD_NBYTES, Head, Pin
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.server import scan, survey
from kvconnect.backends.redis.settings import Mode
from kvconnect.backends.redis.wire import Reply
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey
from kvconnect.trace import warn_once

# The keys of a lookup that are requested at once; those behind the first absent one are wasted.
_CHUNK = 256
_HEAD_AND_METADATA = 4096  # most have less
# The longest part of a listing without a new block: a server skips all else in less time.
_MOST_BARREN_S = 60.0
# The TTL of an index of children whose blocks have no TTL; otherwise added to the blocks' TTL.
_INDEX_TTL_S = 30 * 86400.0
_INDEX_SLACK_S = 60.0

State: TypeAlias = Head | Outcome
"""The state of a block: its `Head` if it is complete, else ``ABSENT`` or ``BROKEN``."""


class RedisFinder:
    """Finds, describes and deletes blocks. Belongs to the event loop."""

    def __init__(self, router: RedisRouter) -> None:
        self._router = router
        self._names = router.names

    async def states(self, keys: Sequence[BlockKey]) -> list[State]:
        """Returns the state of every one of `keys`; those found count as used.

        A block that was pinned beyond its expiry is ``ABSENT`` from the end of its pin on. In a
        cluster it is found until a sweep, as no lookup may wait for the one node with the pins.
        """
        if not keys:
            return []
        asks = self._head_commands(keys)
        if self._router.settings.mode is not Mode.CLUSTER:
            asks.append(about(b"HMGET", self._names.pins, *keys))
        replies = await self._router.ask(asks)
        heads, parts = self._heads(keys, replies[: len(keys)])
        pins = replies[-1] if len(replies) > len(keys) else None
        if isinstance(pins, list):  # else the user has no right to pins
            for number, pin in enumerate(map(Pin.parse, pins[: len(keys)])):
                if pin is not None and pin.has_outlived:
                    heads[number] = Outcome.ABSENT
            parts = [one for one in parts if heads[one[0]] is not Outcome.ABSENT]
        touched = await self._router.answers([about(b"TOUCH", name) for _, name in parts])
        for (number, _), num_touched in zip(parts, touched, strict=True):
            if num_touched != 1:
                heads[number] = Outcome.BROKEN
        return heads

    async def leading(self, keys: Sequence[BlockKey]) -> list[Head]:
        """Returns the heads of the leading `keys` that are complete."""
        found: list[Head] = []
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            found += leading_heads(await self.states(chunk))
            if len(found) < start + len(chunk):
                break
        return found

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`: first their pins, then their other values, which the first one names."""
        if keys:
            (reply,) = await self._router.ask([about(b"HDEL", self._names.pins, *keys)])
            if not of_another_type(reply):  # which holds no pins
                sound(reply)
        heads, parts = await self.heads(keys)
        await self.unlink([name for _, name in parts])
        there = zip(keys, heads, strict=True)
        await self.unlink([self._names.block(key) for key, h in there if h is not Outcome.ABSENT])

    async def unlink(self, names: Sequence[bytes]) -> None:
        """Deletes values by their names."""
        await self._router.answers([about(b"UNLINK", name) for name in names])

    async def describe(self, keys: Sequence[BlockKey]) -> list[StoredEntry | None]:
        """Returns the entry of each of `keys`; ``None`` if there is no such block.

        Counts as use only with Redis before 7.2, where every read does.
        """
        stored = [self._names.block(key) for key in keys]
        # The idle time is read first, because with such servers other reads reset it.
        idle = [Ask(name, command(b"OBJECT", b"IDLETIME", name)) for name in stored]
        pinned = [about(b"HMGET", self._names.pins, *keys)] if keys else []
        replies = await self._router.look(
            [*idle, *(_start(name, _HEAD_AND_METADATA) for name in stored), *pinned]
        )
        idles, starts = replies[: len(keys)], replies[len(keys) : 2 * len(keys)]
        pins = _pins(replies[-1], len(keys)) if keys else []
        heads = [Head.parse(start) if isinstance(start, bytes) else None for start in starts]
        long = {
            at: HEAD_NBYTES + head.metadata_nbytes
            for at, head in enumerate(heads)
            if head is not None and HEAD_NBYTES + head.metadata_nbytes > _HEAD_AND_METADATA
        }
        whole = await self._router.look([_start(stored[at], nbytes) for at, nbytes in long.items()])
        for at, start in zip(long, whole, strict=True):
            starts[at] = start
        return [_entry(*one) for one in zip(keys, heads, starts, idles, pins, strict=True)]

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Lists all blocks; see `RedisBackend.scan`."""
        await self._router.refresh()
        seen: set[BlockKey] = set()  # servers may list a key twice
        for server in self._router.topology.servers:
            cursor = -1  # before the first page
            given: set[int] = set()  # since the last new key
            fruitful_at = time.monotonic()
            while cursor != 0:
                step = partial(scan, self._names.prefix + b"b:", max(cursor, 0))
                cursor, names = await self._router.on(server, step)
                listed = dict.fromkeys(map(self._names.key, names))
                keys = [key for key in listed if key is not None and key not in seen]
                seen.update(keys)
                if keys:
                    given.clear()
                    fruitful_at = time.monotonic()
                if cursor in given or time.monotonic() - fruitful_at > _MOST_BARREN_S:
                    raise BackendUnavailable(f"Redis at {server}: its listing does not end")
                given.add(cursor)
                for entry in await self.describe(keys):
                    if entry is not None:
                        yield entry

    async def totals(self) -> dict[str, float]:
        """Returns numbers of all servers; see `RedisBackend.stats`."""
        await self._router.refresh()
        surveys = await self._router.everywhere(partial(survey, self._names))
        numbers: dict[str, float] = {name: sum(one[name] for one in surveys) for name in surveys[0]}
        if not all(one["maxmemory"] for one in surveys):
            del numbers["maxmemory"]
        return numbers

    async def heads(self, keys: Sequence[BlockKey]) -> tuple[list[State], list[tuple[int, bytes]]]:
        """Returns the states in the first values of `keys`, and the names of the others.

        Each name comes with the index of its key.
        """
        return self._heads(keys, await self._router.ask(self._head_commands(keys)))

    def _head_commands(self, keys: Sequence[BlockKey]) -> list[Ask]:
        return [head_command(self._names.block(key)) for key in keys]

    def _heads(
        self, keys: Sequence[BlockKey], replies: Sequence[Reply]
    ) -> tuple[list[State], list[tuple[int, bytes]]]:
        heads = [state_of(reply) for reply in replies]
        parts = [
            (number, name)
            for number, head in enumerate(heads)
            if isinstance(head, Head)
            for name in self._names.parts(keys[number], head)
        ]
        return heads, parts


def leading_heads(results: Sequence[object]) -> list[Head]:
    """Returns the heads before the first of `results` that is no head."""
    heads: list[Head] = []
    for result in results:
        if not isinstance(result, Head):
            break
        heads.append(result)
    return heads


def _start(name: bytes, nbytes: int) -> Ask:
    return about(b"GETRANGE", name, 0, nbytes - 1)


def _pins(reply: Reply, count: int) -> list[Pin | None]:
    """Returns the pin of each of `count` blocks; `reply` is to HMGET."""
    if of_another_type(reply):  # which holds no pins
        return [None] * count
    found = sound(reply)
    if not isinstance(found, list) or len(found) != count:
        raise BackendUnavailable(f"Redis: {str(found)[:100]} where {count} values were due")
    return list(map(Pin.parse, found))


def _entry(
    key: BlockKey, head: Head | None, start: Reply, idle: Reply, pin: Pin | None
) -> StoredEntry | None:
    if head is None or not isinstance(start, bytes) or (pin is not None and pin.has_outlived):
        return None
    end = HEAD_NBYTES + head.metadata_nbytes
    metadata = BlockMetadata.from_bytes(start[HEAD_NBYTES:end])
    if metadata is None or len(start) < end:
        return None
    # With an LFU policy servers do not report it.
    used_at = time.time() - idle if isinstance(idle, int) else head.created_at
    entry = metadata.entry(key, head.frame_nbytes, created_at=head.created_at, used_at=used_at)
    if pin is None or pin.until <= time.time():
        return entry
    return replace(entry, pinned_until=pin.until)


class RedisChildren:
    """A sorted set per parent: the newest `MAX_CHILDREN` blocks, by the time they were saved.

    The set may contain absent blocks, which `get` filters out, and lack stored ones: an evicted
    index grows anew as blocks are saved.
    """

    def __init__(self, router: RedisRouter, finder: RedisFinder) -> None:
        self._router = router
        self._finder = finder
        ttl = router.settings.ttl
        ttl_s = _INDEX_TTL_S if ttl is None else ttl + _INDEX_SLACK_S
        self._ttl_ms = round(1e3 * ttl_s)

    async def add(self, blocks: Sequence[StoredBlock]) -> None:
        """Lists those of `blocks` whose tokens are known; warns once of a server that fails."""
        asks = []
        for block in blocks:
            if block.tokens is None:
                continue
            name = self._router.names.children(block.parent)
            member = child_to_bytes(Child(block.key, block.tokens))
            asks += [
                about(b"ZADD", name, repr(time.time()), member),
                about(b"ZREMRANGEBYRANK", name, 0, -MAX_CHILDREN - 1),
                about(b"PEXPIRE", name, self._ttl_ms),
            ]
        try:
            replies = await self._router.ask(asks)
            if await self._drop_junk(asks, replies):
                replies = await self._router.ask(asks)
            for reply in replies:
                sound(reply)
        except BackendUnavailable as error:
            # The blocks are still found by their keys.
            warn_once("redis.children", f"blocks are stored without the index of tails: {error}")

    async def remove(self, keys: Sequence[BlockKey]) -> None:
        """Removes the stored blocks among `keys` from their parents' sets, with their tokens."""
        entries = await self._finder.describe(keys)
        asks = [
            about(
                b"ZREM",
                self._router.names.children(one.parent),
                child_to_bytes(Child(one.key, one.tokens)),
            )
            for one in entries
            if one is not None and one.tokens is not None
        ]
        for reply in await self._router.ask(asks):
            if not of_another_type(reply):
                sound(reply)

    async def get(self, parent: BlockKey | None) -> list[Child]:
        """Returns the listed blocks that are stored, newest first."""
        name = self._router.names.children(parent)
        found = about(b"ZREVRANGE", name, 0, MAX_CHILDREN - 1)
        replies = await self._router.ask([found])
        if await self._drop_junk([found], replies):
            return []
        members = sound(replies[0])
        if not isinstance(members, list):
            raise BackendUnavailable(f"Redis: {members!r} where a list was due")
        listed = [(member, child) for member in members if (child := child_from_bytes(member))]
        states = await self._finder.states([child.key for _, child in listed])
        pairs = list(zip(listed, states, strict=True))
        gone = [member for (member, _), state in pairs if not isinstance(state, Head)]
        if gone:
            await self._router.ask([about(b"ZREM", name, *gone)])
        return [child for (_, child), state in pairs if isinstance(state, Head)]

    async def _drop_junk(self, asks: Sequence[Ask], replies: Sequence[Reply]) -> bool:
        """Deletes values of another type under an index's name; returns whether there were any."""
        pairs = zip(asks, replies, strict=True)
        junk = {one.name for one, reply in pairs if of_another_type(reply)}
        await self._finder.unlink(sorted(junk))
        return bool(junk)
