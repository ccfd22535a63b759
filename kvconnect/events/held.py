"""The blocks that one server holds, according to its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from kvconnect.events.format import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hash,
    WireEvent,
)
from kvconnect.events.links import next_link, prefix_links


class HeldBlocks:
    """The blocks of one server. Not thread-safe.

    A block counts as held while some medium has it. Blocks whose parent is unknown, because its
    event was missed, do not count. Only blocks of the first pool group count.

    Args:
        limit: the most blocks; beyond it the oldest are removed.

    Attributes:
        block_size: tokens of a block; ``None``: no block was stored yet.
    """

    def __init__(self, limit: int) -> None:
        self.block_size: int | None = None
        self._limit = limit
        self._links: dict[Hash, bytes] = {}
        self._media: dict[Hash, set[str | None]] = {}
        self._held: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._links)

    def apply(self, events: Iterable[WireEvent]) -> None:
        """Applies events in their order."""
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.clear()
                case BlockStored() if not event.group_idx:
                    self._stored(event)
                case BlockRemoved() if not event.group_idx:
                    for key in event.block_hashes:
                        self._left(key, event.medium)
                case _:
                    pass

    def matched(self, links: Iterable[bytes]) -> int:
        """Returns how many leading ones of `links` are held; changes nothing."""
        count = 0
        for link in links:
            if link not in self._held:
                break
            count += 1
        return count

    def clear(self) -> None:
        """Removes all blocks."""
        self._links.clear()
        self._media.clear()
        self._held.clear()

    # ---------------------------------------------------------------- inside

    def _stored(self, event: BlockStored) -> None:
        keys, size = event.block_hashes, event.block_size
        if not event.token_ids:  # a change of the medium
            for key in keys:
                if key in self._links:
                    self._media[key].add(event.medium)
            return
        if size < 1 or len(event.token_ids) != size * len(keys):
            return
        self.block_size = size
        for key, link in zip(keys, self._chained(event), strict=False):
            self._enter(key, link, event.medium)
        for key in list(islice(self._links, max(0, len(self._links) - self._limit))):
            self._drop(key)

    def _chained(self, event: BlockStored) -> Iterator[bytes]:
        size, tokens = event.block_size, event.token_ids
        if event.parent_block_hash is None:
            extra = event.extra_keys[0] if event.extra_keys else None
            adapter = event.lora_id if event.lora_name is None else event.lora_name
            yield from prefix_links(tokens, size, adapter, "/".join(map(str, extra or ())))
            return
        link = self._links.get(event.parent_block_hash)
        if link is None:
            return
        for start in range(0, len(tokens), size):
            link = next_link(link, tokens[start : start + size])
            yield link

    def _enter(self, key: Hash, link: bytes, medium: str | None) -> None:
        if key in self._links:
            self._media[key].add(medium)
            return
        self._links[key] = link
        self._media[key] = {medium}
        self._held[link] = self._held.get(link, 0) + 1

    def _left(self, key: Hash, medium: str | None) -> None:
        media = self._media.get(key)
        if media is None:
            return
        media.discard(medium)
        if not media or medium is None:
            self._drop(key)

    def _drop(self, key: Hash) -> None:
        link = self._links.pop(key)
        del self._media[key]
        if self._held[link] == 1:
            del self._held[link]
        else:
            self._held[link] -= 1
