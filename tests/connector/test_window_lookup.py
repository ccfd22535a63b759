"""How far a store can supply a prompt whose layers have windows, against trying every length."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
import torch
from bench_engine import DIGEST, T
from hypothesis import given
from hypothesis import strategies as st
from stores import DictStore

from kvconnect.backend import Child, StoredBlock
from kvconnect.connector.io.lookup import Hit, Lookup, blocks_needed
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey, KeyChain, Shard, chain_key, store_key
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import stored_heads
from kvconnect.tokens import TokenArray, TokenBuffer

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class Asked:
    """A prompt of a model with a pool group of each of `layouts`."""

    tokens: TokenArray
    layouts: tuple[KvCacheLayout, ...]
    state_interval: int | None = None

    @property
    def chain(self) -> KeyChain:
        return KeyChain(DIGEST, T, TokenBuffer(self.tokens))

    @cached_property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self.chain.keys())

    @property
    def windows(self) -> Windows:
        return tuple(layout.window for layout in self.layouts)

    def lookup(self, store: DictStore) -> Lookup:
        heads = stored_heads(self.layouts, Shard())
        return Lookup(store, heads, state_interval=self.state_interval)


def query(num_tokens: int, windows: Windows) -> Asked:
    tokens = np.arange(1, num_tokens + 1, dtype=np.int32)
    layouts = (KvCacheLayout(1, 1, 1, 1, T, torch.float64, window) for window in windows)
    return Asked(tokens, tuple(layouts))


def store_of(query: Asked, present: Iterable[tuple[int, int]]) -> DictStore:
    """A store with these blocks: (group, number)."""
    store = DictStore(enumerable=False)
    for group, number in present:
        store.frames[store_key(query.keys[number], group)] = None
    return store


def ask(store: DictStore, query: Asked, **limits: int) -> Hit:
    return asyncio.run(query.lookup(store).find(query.chain, **limits))


def suffices(query: Asked, present: set[tuple[int, int]], end: int) -> bool:
    """The rule, token by token: every group has the blocks of all tokens that it sees from `end`.

    And of all tokens that are in one block with `end`, which is going to be written to.
    """
    for group, window in enumerate(query.windows):
        first = 0 if window is None else max(0, end - window + 1)
        for token in range(end):
            seen = token >= first or token // T == end // T
            if seen and (group, token // T) not in present:
                return False
    return True


@st.composite
def cases(draw: st.DrawFn) -> tuple[Asked, set[tuple[int, int]]]:
    windows: list[int | None] = draw(st.lists(st.integers(1, 24), min_size=0, max_size=2))
    num_full = draw(st.integers(0 if windows else 1, 2))
    asked = query(draw(st.integers(1, 60)), (*[None] * num_full, *windows))
    present = set()
    for group in range(len(asked.windows)):
        gaps = draw(st.lists(st.integers(0, 14), max_size=4))
        present |= {(group, number) for number in range(len(asked.keys)) if number not in gaps}
    return asked, present


@given(cases())
def test_it_is_the_longest_that_all_windows_allow(case: tuple[Asked, set]) -> None:
    asked, present = case
    store = store_of(asked, present)
    hit = ask(store, asked, most_steps=1000)
    asked_for = [key for keys in store.lookups for key in keys]
    assert len(asked_for) == len(set(asked_for))  # no block twice
    most = min(len(asked.keys) * T, asked.lookup(store).most(len(asked.tokens)))
    assert hit.end == max(end for end in range(most + 1) if suffices(asked, present, end))
    assert hit.keys == asked.keys[: -(-hit.end // T)]
    for group, stored in enumerate(hit.num_stored):
        first = blocks_needed(asked.windows[group], hit.end, T).start
        assert {(group, number) for number in range(first, stored)} <= present


@given(cases(), st.integers(0, 2))
def test_with_few_steps_it_is_shorter_at_most(case: tuple[Asked, set], steps: int) -> None:
    asked, present = case
    store = store_of(asked, present)
    hit = ask(store, asked, most_steps=steps)
    assert suffices(asked, present, hit.end)
    assert hit.end <= ask(store_of(asked, present), asked, most_steps=1000).end
    assert len(store.lookups) <= len(asked.windows) * (2 + steps)


def test_what_no_window_covers_is_not_asked_for() -> None:
    asked = query(20 * T + 1, (None, 2 * T + 1))
    store = store_of(asked, [(group, number) for group in (0, 1) for number in range(20)])
    assert ask(store, asked).end == 20 * T
    [full, window] = store.lookups
    assert full == [store_key(key, 0) for key in asked.keys]
    assert window == [store_key(key, 1) for key in asked.keys[18:]]


def test_a_store_full_of_gaps_is_asked_a_few_times_only() -> None:
    asked = query(2000 * T + 1, (None, 4 * T))
    present = {(group, number) for group in (0, 1) for number in range(2000)}
    present -= {(1, number) for number in range(300, 2000, 3)}
    store = store_of(asked, present)
    assert ask(store, asked).end == 300 * T
    assert len(store.lookups) <= 12


def test_whole_blocks_count_where_the_index_of_tails_cannot_be_read() -> None:
    asked = query(3 * T + 3, (None,))
    store = store_of(asked, [(0, number) for number in range(3)])
    store.capabilities = replace(store.capabilities, enumerable=True)

    async def children(key: object) -> list[Child]:
        raise BackendUnavailable("WRONGTYPE, and it may not be deleted")

    store.children = children  # type: ignore[method-assign]
    hit = ask(store, asked)
    assert (hit.end, hit.tail, hit.num_stored) == (3 * T, None, (3,))


@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_a_tail_counts_where_every_group_has_it(missing: int | None) -> None:
    asked = query(3 * T + 3, (None, None, 5))
    store = store_of(asked, [(group, number) for group in range(3) for number in range(3)])
    store.capabilities = replace(store.capabilities, enumerable=True)
    own = asked.tokens[3 * T :]
    tail = chain_key(asked.keys[-1], own)
    for group in range(3):
        if group != missing:
            key, parent = store_key(tail, group), store_key(asked.keys[-1], group)
            store.frames[key] = None
            store.blocks.append(StoredBlock(key, None, parent, own, group=group))
    hit = ask(store, asked)
    assert hit.end == (3 * T + 2 if missing is None else 3 * T)
    assert hit.tail == (tail if missing is None else None)
