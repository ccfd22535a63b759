"""Translates the block manager's events into vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from kvconnect.cache.pool.events import Created, KvCacheEvent, Removed, Stored, Updated
from kvconnect.events.format import CPU, GPU, BlockRemoved, BlockStored, WireEvent
from kvconnect.keys import Namespace
from kvconnect.layout import KvCacheLayout

__all__ = ["Translation"]

_MEDIA = (GPU, CPU)
"""By level: primary, secondary."""


class Translation:
    """Translates events of pools of `layouts`. It keeps nothing of the events.

    vLLM's format knows whole blocks only, and no pools' sizes or priorities: other events have no
    translation. The salt of a namespace is never told, only the digest of the namespace.
    """

    def __init__(self, layouts: Sequence[KvCacheLayout]) -> None:
        self._tokens_per_block = layouts[0].tokens_per_block
        self._groups = {layout.window: group for group, layout in enumerate(layouts)}

    def of(self, event: KvCacheEvent) -> Iterator[WireEvent]:
        """Yields what subscribers learn of `event`; often nothing."""
        group = self._groups[event.window]
        match event.data:
            case Stored():
                yield from self._stored(event.data, event.window, group)
            case Removed(keys=keys, level=level, is_tail=False):
                yield BlockRemoved(list(keys), _MEDIA[level], group)
            case Updated(key=key, level=(old, new), is_tail=False):
                # In this order, so that the block is never gone in between.
                yield BlockStored([key], None, [], 0, None, _MEDIA[new], None, group_idx=group)
                yield BlockRemoved([key], _MEDIA[old], group)
            case Created() | Removed() | Updated():
                pass

    def _stored(self, stored: Stored, window: int | None, group: int) -> Iterator[WireEvent]:
        blocks = [one for one in stored.blocks if len(one.tokens) == self._tokens_per_block]
        if not blocks:
            return
        first = blocks[0]
        lora = first.lora_id
        plain = Namespace(lora_id=lora).id.digest == first.namespace
        yield BlockStored(
            [one.key for one in blocks],
            stored.parent_key,
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
