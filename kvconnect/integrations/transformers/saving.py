"""The saving of blocks of a batch's rows from a cache to the store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvconnect.connector.io.blocking import StoreAccess
from kvconnect.connector.io.orders import SaveOrder
from kvconnect.integrations.transformers.cached_row import CachedRow
from kvconnect.integrations.transformers.ended_caches import EndedCaches
from kvconnect.integrations.transformers.guard import ModelGuard
from kvconnect.integrations.transformers.tensors import LayerTensors, as_blocks, tail_block
from kvconnect.layout import KvCacheLayout

__all__ = ["SavingTo", "save_full_blocks", "save_tails"]


@dataclass(frozen=True, slots=True, eq=False)
class SavingTo:
    """The destination of a cache that is saved, and how it is saved.

    Attributes:
        store: where.
        layouts: of its pool groups.
        max_tokens: sequences beyond that are not saved any more; ``None``: no limit.
        ended: takes caches in that no one refers to any more.
        guard: of the model that computes.
    """

    store: StoreAccess
    layouts: tuple[KvCacheLayout, ...]
    max_tokens: int | None
    ended: EndedCaches[Any]
    guard: ModelGuard


def save_full_blocks(
    saving: SavingTo, rows: Sequence[CachedRow], layers: Sequence[LayerTensors], end: int
) -> None:
    """Saves the full blocks of the first `end` tokens, padding included, that are due."""
    for number, row in enumerate(rows):
        valid = end - row.offset
        if not row.num_due(valid):
            continue
        with ExitStack() as attached:
            first_ids: list[int | None] = []
            for group, layout in enumerate(saving.layouts):
                size = layout.tokens_per_block
                low, high = row.num_done[group] * size, valid - valid % size
                if low >= high:
                    first_ids.append(None)
                    continue
                tokens = range(row.offset + low, row.offset + high)
                blocks = as_blocks(layers, layout, number, tokens)
                copier = saving.store.attached[group]
                first_ids.append(attached.enter_context(copier.attached(blocks)))
            order = row.order(valid, first_ids)
            if _saved(saving.store, order) == len(order.blocks):
                row.saved(valid)
            else:
                row.open = False


def save_tails(
    saving: SavingTo, rows: Sequence[CachedRow], layers: Sequence[LayerTensors], end: int
) -> None:
    """Saves the partly filled blocks that end with the first `end` tokens, if the store can."""
    if not saving.store.saves_tails:
        return
    size = saving.layouts[0].tokens_per_block
    for number, row in enumerate(rows):
        valid = end - row.offset
        if not row.open or valid % size == 0:
            continue
        tokens = range(row.offset + valid - valid % size, end)
        with ExitStack() as attached:
            first_ids = [
                attached.enter_context(copier.attached(tail_block(layers, layout, number, tokens)))
                for copier, layout in zip(saving.store.attached, saving.layouts, strict=True)
            ]
            order = row.tail_order(valid, first_ids)
            if order is not None:
                _saved(saving.store, order)


def _saved(store: StoreAccess, order: SaveOrder) -> int:
    return store.save(order.blocks, namespace=order.namespace)
