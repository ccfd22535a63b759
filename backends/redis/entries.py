"""What is known of blocks besides their bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvconnect.backend import StoredEntry
from kvconnect.backends.redis.format import HEAD_NBYTES, Head, Names, entry_from
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.transfer import Ask, command
from kvconnect.backends.redis.wire import Reply
from kvconnect.keys import BlockKey

__all__ = ["describe"]

_HEAD_AND_METADATA = 4096  # most have less


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
    # Under an LFU policy servers do not tell.
    used_at = time.time() - idle if isinstance(idle, int) else head.created_at
    metadata = start[HEAD_NBYTES : HEAD_NBYTES + head.metadata_nbytes]
    return entry_from(key, head, metadata, used_at)
