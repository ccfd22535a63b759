"""The stored part of a batch of prompts, loaded into tensors of transformers' shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvconnect.connector.io.blocking import StoreAccess
from kvconnect.connector.io.lookup import Hit, blocks_needed
from kvconnect.connector.io.orders import BlockLoad
from kvconnect.integrations.core.load_choice import LoadChoice, PlannedLoad
from kvconnect.integrations.transformers.cache_layers import (
    LayerTensors,
    as_blocks,
    new_layers,
    new_snapshot,
    state_block,
)
from kvconnect.integrations.transformers.rows import CachedRow
from kvconnect.layout import KvCacheLayout


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """Keys and values of the first tokens of a batch.

    Attributes:
        num_tokens: leading tokens of every row, padding included.
        layers: by number; ``[batch, num_tokens, heads, dim]``. Zeros where there is padding, and
            where a window does not reach any more.
        states: a snapshot for each group of states; see `cache_layers.new_snapshot`.
        branch: leading tokens of every row whose keys and values are stored, but not loaded if no
            state is stored there.
        least: the fewest tokens, if not 0, that a caller may keep; windows lack those before.
    """

    num_tokens: int = 0
    layers: Mapping[int, LayerTensors] = field(default_factory=dict)
    states: tuple[Tensor, ...] = ()
    branch: int = 0
    least: int = 0


def restore(
    store: StoreAccess,
    layouts: Sequence[KvCacheLayout],
    rows: Sequence[CachedRow],
    *,
    device: torch.device,
    min_tokens: int,
    choice: LoadChoice,
) -> Restored:
    """Looks `rows` up and loads what all of them have. Blocks as the store's calls do.

    Loads nothing if computing is predicted to be faster.

    transformers keeps one length for all rows of a batch. So only tokens up to which every row is
    stored, or padded, are loaded.

    Args:
        store: the store to look in.
        layouts: the layouts of its pool groups.
        rows: the rows, which record what the store has of them.
        device: the device of the tensors.
        min_tokens: load only if some row gets at least so many.
        choice: whether to load or to compute.
    """
    hits, branch = _find(store, layouts, rows)
    num_tokens = min(row.offset + hit.end for row, hit in zip(rows, hits, strict=True))
    ends = [max(0, num_tokens - row.offset) for row in rows]
    nothing = Restored(branch=branch)
    if max(ends) < max(1, min_tokens):
        return nothing
    load = _chosen(choice, rows, ends)
    if load is None:
        return nothing
    size = layouts[0].tokens_per_block
    has_windows = any(layout.window is not None for layout in layouts)  # or states
    divisible = len(layouts) == 1 and not has_windows
    layers, states, missing = _loaded(store, layouts, rows, hits, ends, device)
    reached, num_loaded = num_tokens, 0
    for row, end, count in zip(rows, ends, missing, strict=True):
        valid = end
        if count is not None:
            valid = min(end, count * size) if divisible else 0
            row.note_missing(valid)
            reached = min(reached, row.offset + valid)
        num_loaded += valid
    choice.end(load, min(num_loaded, load.num_tokens))
    # A window was loaded for the end that was planned, and for no other.
    if reached < num_tokens and has_windows:
        return nothing
    if max(reached - row.offset for row in rows) <= 0:
        return nothing
    kept = {number: (k[:, :reached], v[:, :reached]) for number, (k, v) in layers.items()}
    windows = [one.window for one in layouts if one.kind != "state"]
    is_whole = not any(blocks_needed(window, end, size).start for window in windows for end in ends)
    return Restored(reached, kept, states, branch, 0 if is_whole else reached)


def _loaded(
    store: StoreAccess,
    layouts: Sequence[KvCacheLayout],
    rows: Sequence[CachedRow],
    hits: Sequence[Hit],
    ends: Sequence[int],
    device: torch.device,
) -> tuple[dict[int, LayerTensors], tuple[Tensor, ...], list[int | None]]:
    """Loads tokens up to `ends` of each row, and blocks until the loads have ended.

    Returns:
        The layers and the snapshots; for each row the blocks that came, or ``None`` if all did.
    """
    size = layouts[0].tokens_per_block
    whole = [-(-end // size) * size for end in ends]
    layers = new_layers(
        layouts,
        batch=len(rows),
        num_tokens=max(row.offset + length for row, length in zip(rows, whole, strict=True)),
        device=device,
        zeroed=any(layout.window is not None for layout in layouts)
        or any(row.offset for row in rows),
    )
    states = {
        group: new_snapshot(layout, len(rows), device)
        for group, layout in enumerate(layouts)
        if layout.kind == "state"
    }
    with ExitStack() as attached:
        orders: list[list[BlockLoad]] = []
        for number, (row, hit) in enumerate(zip(rows, hits, strict=True)):
            order: list[BlockLoad] = []
            tokens = range(row.offset, row.offset + whole[number])
            for group, layout in enumerate(layouts if tokens else ()):
                if group in states:
                    blocks = state_block(states[group], layout, number)
                else:
                    blocks = as_blocks(layers, layout, number, tokens)
                first = attached.enter_context(store.attached[group].attached(blocks))
                order += _loads(hit, group, layout, ends[number], first)
            orders.append(order)
        loaded = store.load_all(orders)
    missing = [
        count if count < len(order) else None for order, count in zip(orders, loaded, strict=True)
    ]
    return layers, tuple(states.values()), missing


def _find(
    store: StoreAccess, layouts: Sequence[KvCacheLayout], rows: Sequence[CachedRow]
) -> tuple[list[Hit], int]:
    """Returns what the store has of each row, which records it, and the `Restored.branch`.

    With states all hits have one end, since a state is of use at its own end only.
    """
    has_states = any(layout.kind == "state" for layout in layouts)
    full = [group for group, layout in enumerate(layouts) if layout.window is None]
    most: int | None = None
    branch = 0
    firsts: list[Hit] = []
    while True:
        hits = store.find([row.asked(most) for row in rows])
        firsts = firsts or hits
        if most is None and has_states and full:
            stored = [hit.num_stored[group] for hit in hits if hit.num_stored for group in full]
            branch = min(stored, default=0) * layouts[0].tokens_per_block
        ends = {hit.end for hit in hits}
        if not has_states or len(ends) == 1:
            for row, first, hit in zip(rows, firsts, hits, strict=True):
                row.note_hit(_noted(first, hit, full))
            return hits, branch
        most = min(ends)


def _noted(first: Hit, last: Hit, full: Sequence[int]) -> Hit:
    """Returns the hit to record after several lookups, `full` being groups of full attention.

    The first lookup saw all keys and values. A snapshot before a later one of the first lookup need
    not be there: those up to the end of the last lookup are.
    """
    if not (first.num_stored and last.num_stored):
        return last
    stored = (
        first.num_stored[group] if group in full else count
        for group, count in enumerate(last.num_stored)
    )
    return replace(last, num_stored=tuple(stored))


def _chosen(
    choice: LoadChoice, rows: Sequence[CachedRow], ends: Sequence[int]
) -> PlannedLoad | None:
    """Starts and returns the load of `rows` up to `ends`; ``None`` if they are to be computed."""
    load = choice.choose(
        0,
        max(1, sum(ends) // len(rows)),
        sum(len(row.tokens) for row in rows) // len(rows),
        num_rows=len(rows),
    )
    if load is not None:
        choice.start(load)
    return load


def _loads(hit: Hit, group: int, layout: KvCacheLayout, end: int, first_id: int) -> list[BlockLoad]:
    keys = hit.all_keys
    return [
        BlockLoad(
            keys[number],
            first_id + (0 if layout.kind == "state" else number),
            group,
            hit.shares.get((group, number)),
        )
        for number in blocks_needed(layout.window, end, layout.tokens_per_block)
    ]
