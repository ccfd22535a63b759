"""Blocks in Redis, found, read and deleted: each of them one value or several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

from torch import Tensor

from kvconnect.backend import StoredEntry
from kvconnect.backends.entries import BlockMetadata
from kvconnect.backends.redis.commands import (
    Ask,
    Outcome,
    Want,
    command,
    head_command,
    sound,
    state_of,
)
from kvconnect.backends.redis.format import HEAD_NBYTES, Head, Names
from kvconnect.backends.redis.load import fetch
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.wire import Reply
from kvconnect.errors import BackendUnavailable
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.trace import count

__all__ = ["RedisBlocks", "State", "describe"]

# Of one lookup: what is asked about keys behind the first absent one is asked in vain.
_CHUNK = 256
_HEAD_AND_METADATA = 4096  # most have less

State: TypeAlias = Head | Outcome
"""Of a block: `Head` if it is wholly there, else ``ABSENT`` or ``BROKEN``."""


class RedisBlocks:
    """The blocks behind `router`. Belongs to the event loop."""

    def __init__(self, router: RedisRouter, names: Names) -> None:
        self._router = router
        self.names = names

    async def states(self, keys: Sequence[BlockKey]) -> list[State]:
        """Of every one of `keys`; those found count as used."""
        heads = await self._heads(keys)
        parts = [
            (number, name)
            for number, head in enumerate(heads)
            if isinstance(head, Head)
            for name in self.names.parts(keys[number], head)
        ]
        if not parts:
            return heads
        touched = await self._router.ask([Ask(name, command(b"TOUCH", name)) for _, name in parts])
        for (number, _), reply in zip(parts, touched, strict=True):
            if sound(reply) != 1:
                heads[number] = Outcome.BROKEN
        return heads

    async def leading(self, keys: Sequence[BlockKey]) -> list[Head]:
        """The heads of the leading `keys` that are wholly there."""
        found: list[Head] = []
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            found += _leading(await self.states(chunk))
            if len(found) < start + len(chunk):
                break
        return found

    async def load(
        self, keys: Sequence[BlockKey], into: Sequence[Tensor], checksums: Sequence[FrameChecksum]
    ) -> int:
        """Fill leading buffers; those behind stay untouched unless blocks vanish meanwhile.

        If there are `checksums`, each is told of the first part of its frame.
        """
        views = [buffer.numpy().data for buffer in into]
        wanted = [self.names.block(key) for key in keys]
        if self._router.spread(wanted):
            # Servers do not know of each other's misses.
            heads = await self.leading(keys)
            while heads and heads[-1].frame_nbytes > len(views[len(heads) - 1]):
                heads.pop()
            del wanted[len(heads) :]
        results = await self._router.run(
            fetch,
            [
                Want(name, view, checksum=checksum)
                for name, view, checksum in zip_longest(wanted, views, checksums)
                if name is not None
            ],
            "fetch",
        )
        broken = {keys[n] for n, result in enumerate(results) if result is Outcome.BROKEN}
        heads = _leading(results)
        parts = [
            (number, Want(name, views[number][head.part(part)], headed=False))
            for number, head in enumerate(heads)
            for part, name in enumerate(self.names.parts(keys[number], head), 1)
        ]
        good = len(heads)
        if parts:
            filled = await self._router.run(fetch, [want for _, want in parts], "fetch")
            for (number, _), result in zip(parts, filled, strict=True):
                if result is not Outcome.DONE:
                    good = min(good, number)
                if result in {Outcome.ABSENT, Outcome.BROKEN}:
                    broken.add(keys[number])
        if broken:
            await self._drop(sorted(broken))
        return good

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys`: first their other parts, which nothing names any more afterwards."""
        heads = await self._heads(keys)
        parts = [
            name
            for key, head in zip(keys, heads, strict=True)
            if isinstance(head, Head)
            for name in self.names.parts(key, head)
        ]
        await self.unlink(parts)
        there = zip(keys, heads, strict=True)
        await self.unlink([self.names.block(key) for key, h in there if h is not Outcome.ABSENT])

    async def unlink(self, names: Sequence[bytes]) -> None:
        """Forget values by their names."""
        if names:
            asks = [Ask(name, command(b"UNLINK", name)) for name in names]
            for reply in await self._router.ask(asks):
                sound(reply)

    async def _heads(self, keys: Sequence[BlockKey]) -> list[State]:
        asks = [head_command(self.names.block(key)) for key in keys]
        return [state_of(reply) for reply in await self._router.ask(asks)]

    async def _drop(self, keys: Sequence[BlockKey]) -> None:
        count("redis.broken", blocks=len(keys))
        try:
            await self.delete(keys)
        except BackendUnavailable:
            return  # the blocks before are good; this one costs another try if it is asked for


def _leading(results: Sequence[object]) -> list[Head]:
    heads: list[Head] = []
    for result in results:
        if not isinstance(result, Head):
            break
        heads.append(result)
    return heads


async def describe(
    router: RedisRouter, names: Names, keys: Sequence[BlockKey]
) -> list[StoredEntry | None]:
    """What is known of each of `keys`; ``None``: it is not there, or is none of ours.

    Counts as use only with servers that know no other way to read: Redis before 7.2.
    """
    stored = [names.block(key) for key in keys]
    # First how long nobody used it: with such servers reading ends that.
    idle = [Ask(name, command(b"OBJECT", b"IDLETIME", name)) for name in stored]
    replies = await router.look([*idle, *(_start(name, _HEAD_AND_METADATA) for name in stored)])
    idles, starts = replies[: len(keys)], replies[len(keys) :]
    heads = [Head.parse(start) if isinstance(start, bytes) else None for start in starts]
    long = {
        at: HEAD_NBYTES + head.metadata_nbytes
        for at, head in enumerate(heads)
        if head is not None and HEAD_NBYTES + head.metadata_nbytes > _HEAD_AND_METADATA
    }
    whole = await router.look([_start(stored[at], nbytes) for at, nbytes in long.items()])
    for at, start in zip(long, whole, strict=True):
        starts[at] = start
    return [_entry(*one) for one in zip(keys, heads, starts, idles, strict=True)]


def _start(name: bytes, nbytes: int) -> Ask:
    return Ask(name, command(b"GETRANGE", name, 0, nbytes - 1))


def _entry(key: BlockKey, head: Head | None, start: Reply, idle: Reply) -> StoredEntry | None:
    if head is None or not isinstance(start, bytes):
        return None
    end = HEAD_NBYTES + head.metadata_nbytes
    metadata = BlockMetadata.from_bytes(start[HEAD_NBYTES:end])
    if metadata is None or len(start) < end:
        return None
    # Under an LFU policy servers do not tell.
    used_at = time.time() - idle if isinstance(idle, int) else head.created_at
    return metadata.entry(key, head.frame_nbytes, created_at=head.created_at, used_at=used_at)
