"""Translates the block manager's events into vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from kvconnect.cache.pool.events import (
    Created,
    KvCacheEvent,
    PublishedBlock,
    Removed,
    Stored,
    Updated,
)
from kvconnect.events.format import CPU, GPU, BlockRemoved, BlockStored, WireEvent
from kvconnect.keys import BlockKey, Namespace
from kvconnect.layout import KvCacheLayout

_MEDIA = (GPU, CPU)
"""By level: primary, secondary."""

_EVENT_BLOCKS = 256
_EVENT_TOKENS = 4096
"""The most blocks and tokens of one event; a longer one is divided."""


class Translation:
    """Translates events of pools of `layouts`. It keeps no state of events.

    vLLM's format has whole blocks only, without pool sizes and priorities; other events have no
    translation. The salt of a namespace is never sent, only the namespace's digest.
    """

    def __init__(self, layouts: Sequence[KvCacheLayout]) -> None:
        self._tokens_per_block = layouts[0].tokens_per_block
        self._blocks = min(_EVENT_BLOCKS, max(1, _EVENT_TOKENS // self._tokens_per_block))
        self._groups = {layout.window: group for group, layout in enumerate(layouts)}

    def of(self, event: KvCacheEvent) -> Iterator[WireEvent]:
        """Yields the translation of `event`: no event, one or several."""
        group = self._groups[event.window]
        match event.data:
            case Stored():
                yield from self._stored(event.data, event.window, group)
            case Removed(keys=keys, level=level, is_tail=False):
                for start in range(0, len(keys), _EVENT_BLOCKS):
                    piece = keys[start : start + _EVENT_BLOCKS]
                    yield BlockRemoved(list(piece), _MEDIA[level], group)
            case Updated(key=key, level=(old, new), is_tail=False):
                # In this order, so that the block is never absent in between.
                yield BlockStored([key], None, [], 0, None, _MEDIA[new], None, group_idx=group)
                yield BlockRemoved([key], _MEDIA[old], group)
            case Created() | Removed() | Updated():
                pass

    def _stored(self, stored: Stored, window: int | None, group: int) -> Iterator[WireEvent]:
        blocks = [one for one in stored.blocks if len(one.tokens) == self._tokens_per_block]
        parent = stored.parent_key
        for start in range(0, len(blocks), self._blocks):
            piece = blocks[start : start + self._blocks]
            yield self._stored_piece(piece, parent, window, group)
            parent = piece[-1].key

    def _stored_piece(
        self,
        blocks: Sequence[PublishedBlock],
        parent: BlockKey | None,
        window: int | None,
        group: int,
    ) -> BlockStored:
        first = blocks[0]
        lora = first.lora_id
        plain = Namespace(lora_id=lora).id.digest == first.namespace
        return BlockStored(
            [one.key for one in blocks],
            parent,
            list(chain.from_iterable(one.tokens for one in blocks)),
            self._tokens_per_block,
            lora if isinstance(lora, int) else None,
            _MEDIA[first.level],
            lora if isinstance(lora, str) else None,
            extra_keys=None if plain else [[first.namespace.hex()]] * len(blocks),
            group_idx=group,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
        )
