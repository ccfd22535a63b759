"""The saving of blocks of a batch's rows from a cache to the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvconnect.connector.io.blocking import StoreAccess
from kvconnect.connector.io.orders import SaveOrder
from kvconnect.integrations.transformers.cache_layers import (
    LayerTensors,
    as_blocks,
    state_block,
    tail_block,
)
from kvconnect.integrations.transformers.ended_caches import EndedCaches
from kvconnect.integrations.transformers.geometry import ModelGeometry
from kvconnect.integrations.transformers.guard import ModelGuard
from kvconnect.integrations.transformers.rows import CachedRow


@dataclass(frozen=True, slots=True, eq=False)
class SavingTo:
    """The destination of a cache that is saved, and how it is saved.

    Attributes:
        store: where.
        geometry: the geometry of the model that computes.
        ended: takes caches in that no one refers to any more.
        guard: the guard of the model.
        state_interval: tokens from one snapshot of states to the next.
    """

    store: StoreAccess
    geometry: ModelGeometry
    ended: EndedCaches[Any]
    guard: ModelGuard
    state_interval: int


def save_rows(
    saving: SavingTo,
    rows: Sequence[CachedRow],
    layers: Mapping[int, LayerTensors],
    end: int,
    *,
    snapshot: Sequence[Tensor] | None = None,
    tails: bool,
) -> None:
    """Saves the blocks of the first `end` tokens, padding included, that are due.

    Args:
        saving: the destination.
        rows: the rows of the batch.
        layers: the keys and values of the batch.
        end: the end of what is computed.
        snapshot: the states after `end` tokens, for each group of states, if they are to be saved.
        tails: the partly filled blocks at the end, too, if the store can find such.
    """
    store, layouts = saving.store, saving.geometry.layouts
    size = layouts[0].tokens_per_block
    groups = list(zip(store.attached, layouts, strict=True))
    divisible = not saving.geometry.states
    for number, row in enumerate(rows):
        num_full, rest = divmod(max(0, end - row.offset), size)
        begin = row.offset + num_full * size  # start of the partly filled block
        with ExitStack() as attached:
            if row.is_due(num_full):
                states = iter(snapshot or ())
                ids: list[Sequence[int]] = []
                for copier, layout in groups:
                    if layout.kind != "state":
                        blocks = as_blocks(layers, layout, number, range(row.offset, begin))
                        first = attached.enter_context(copier.attached(blocks))
                        ids.append(range(first, first + num_full))
                        continue
                    last = -1
                    if (state := next(states, None)) is not None:
                        block = state_block(state, layout, number)
                        last = attached.enter_context(copier.attached(block))
                    ids.append([*[-1] * (num_full - 1), last])
                row.open = _saved(store, row.order(ids, num_full))
            if row.open and rest and tails and divisible and store.saves_tails:
                tail_ids = []
                for copier, layout in groups:
                    block = tail_block(layers, layout, number, range(begin, end))
                    first = attached.enter_context(copier.attached(block))
                    tail_ids.append([*[-1] * num_full, first])
                _saved(store, row.order(tail_ids, num_full, end - row.offset))


def _saved(store: StoreAccess, order: SaveOrder | None) -> bool:
    """Returns whether all blocks of `order` are being saved."""
    if order is None:
        return True
    return store.save(order.blocks, namespace=order.namespace) == len(order.blocks)
