"""Sequences that compute the beginning of a prompt while a store fills its end.

Their pools have windows, or recurrent states.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from small_prompts import request_of

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.cache.pool.matching import first_in_window
from kvconnect.config import KvCacheConfig
from kvconnect.errors import OutOfBlocks
from kvconnect.layout import KvCacheLayout, StateTensor
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch

T = 2
LAYOUT = KvCacheLayout(1, 1, 1, 1, T, torch.float32)
STATES = KvCacheLayout.of_states([StateTensor(1, "recurrent", (2,), torch.float32)], T)
WINDOWS = [[None, 7], [9], [None, 11, 4], [6, 3], [None, 1]]
BESIDE_STATES = [[None], [None, 9], [6]]


class Sequence:
    """A live sequence, how far it is computed and loaded, and where its running state is."""

    def __init__(self, tokens: list[int], matched: int, load_end: int) -> None:
        self.tokens, self.computed, self.load_end = tokens, matched, load_end
        self.loaded_from = load_end
        self.state = 0
        self.pins: list[object] = []


class Book:
    """A manager, and what each of its blocks contains: the tokens up to the block's end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.states = self.random.random() < 0.5
        windows = self.random.choice(BESIDE_STATES if self.states else WINDOWS)
        layouts = [replace(LAYOUT, window=window) for window in windows]
        if self.states:
            windows, layouts = [*windows, T], [*layouts, STATES]
        num_blocks = {window: self.random.choice([9, 14, 30]) for window in windows}
        if self.random.random() < 0.3:
            num_blocks = dict.fromkeys(windows, 60)
        config = KvCacheConfig(
            tokens_per_block=T,
            enable_partial_reuse=False,
            state_interval=self.random.choice([2, 4, 8]),
        )
        self.manager = BlockManager(config, layouts, num_blocks=num_blocks)
        self.windows = [pool.window for pool in self.manager._pools]
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.live: dict[int, Sequence] = {}
        self.numbers = itertools.count()

    def step(self) -> None:
        if not self.live or self.random.random() < 0.2:
            self.add()
        else:
            name = self.random.choice(list(self.live))
            getattr(self, self.random.choice(["compute"] * 4 + ["load"] * 3 + ["pin", "end"]))(name)
        self.manager.check_invariants()
        self.check_owners()

    def add(self) -> None:
        stem = list(range(self.random.choice([0, 8, 20, 30])))
        tokens = [*stem, *(self.random.randrange(3) for _ in range(self.random.randint(1, 9)))]
        name = next(self.numbers)
        matched = self.manager.match(tokens)
        end = self.random.randint(0, len(tokens) - 1)
        end -= end % T if self.states else 0
        beside = end > matched and self.random.random() < 0.7
        more = {"external_end": end, "beside": True, "max_matched": matched} if beside else {}
        try:
            found = self.manager.add_sequence(name, tokens, first_chunk=4, **more)
        except OutOfBlocks:
            return
        self.live[name] = Sequence(tokens, found.matched_tokens, end if beside else 0)
        if beside:
            self.restore(name)
        self.check_window(name, found.matched_tokens)

    def compute(self, name: int) -> None:
        """Computes a chunk, in whole blocks while a load runs; joins the load if it reaches it."""
        one = self.live[name]
        end = min(one.computed + self.random.randint(1, 4), len(one.tokens))
        if one.load_end:
            end = min(-(-end // T) * T, max(one.loaded_from, one.computed), len(one.tokens))
        due = self.manager.next_state_end(name, one.computed)
        end = end if due is None else min(end, due)
        try:
            self.manager.reserve(name, end)
        except OutOfBlocks:
            return
        self.check_window(name, one.computed)
        self.restore(name)
        takes = self.states and end > one.computed
        if takes and (end == one.load_end or self.random.random() < 0.9):
            block = self.manager.state_snapshot(name, end)
            if block is not None:
                self.content[len(self.windows) - 1, block] = tuple(one.tokens[:end])
        self.fill(name, range(one.computed // T, -(-end // T)), end)
        one.computed = one.state = end
        if one.load_end and end >= one.loaded_from:
            self.manager.commit(name, end)
            one.computed, one.load_end = max(end, one.load_end), 0
            self.check_window(name, one.computed)
        if self.random.random() < 0.1:
            self.end(name)
        else:
            self.manager.commit(name, one.computed)

    def restore(self, name: int) -> None:
        """Computing begins with the state after the computed tokens."""
        one = self.live[name]
        if self.states and one.state != one.computed:
            block = self.manager.state_restore(name, one.computed)
            assert block is not None
            assert self.content[len(self.windows) - 1, block] == tuple(one.tokens[: one.computed])
            one.state = one.computed

    def load(self, name: int) -> None:
        """Fills the blocks from a token on, unless they are computed."""
        one = self.live[name]
        if not one.load_end:
            return
        one.loaded_from = max(
            0, min(one.loaded_from, self.random.randint(0, one.load_end)) // T * T
        )
        one.loaded_from = max(one.loaded_from, -(-one.computed // T) * T)
        blocks = range(one.loaded_from // T, -(-one.load_end // T))
        self.fill(name, blocks, one.load_end, at=one.load_end)

    def fill(self, name: int, blocks: range, end: int, at: int | None = None) -> None:
        tokens = self.live[name].tokens
        windows = self.windows[: -1 if self.states and at is None else None]
        for group, window in enumerate(windows):
            first = 0 if at is None else first_in_window(window, at) // T
            ids = self.manager.group_block_ids(name, group)
            for number in blocks:
                if number >= first:
                    assert ids[number] >= 0
                    block = (group, int(ids[number]))
                    self.content[block] = tuple(tokens[: min((number + 1) * T, end)])

    def pin(self, name: int) -> None:
        one = self.live[name]
        if one.pins and self.random.random() < 0.7:
            self.manager.unpin(one.pins.pop())
        else:
            one.pins.append(self.manager.pin(name))

    def end(self, name: int) -> None:
        one = self.live.pop(name)
        if self.random.random() < 0.5:
            self.manager.publish_ended(name, one.computed)
        self.manager.abort(name, one.computed)
        for pin in one.pins:
            self.manager.unpin(pin)

    def check_window(self, name: int, position: int) -> None:
        """Every block that computing from `position` on reads has the tokens of this sequence."""
        tokens = self.live[name].tokens
        for group, window in enumerate(self.windows[: -1 if self.states else None]):
            ids = self.manager.group_block_ids(name, group)
            for number in range(first_in_window(window, position) // T, -(-position // T)):
                wanted = tuple(tokens[: min((number + 1) * T, position)])
                got = self.content[group, int(ids[number])]
                assert got[: len(wanted)] == wanted, (group, number, position)

    def check_owners(self) -> None:
        """No block that one sequence writes is another's."""
        for group in range(len(self.windows)):
            written = [
                int(block)
                for name, one in self.live.items()
                for block in self.manager.group_block_ids(name, group)[-(-one.computed // T) :]
                if block >= 0
            ]
            assert len(written) == len(set(written))


@pytest.mark.parametrize("start", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_sequence_always_has_what_it_reads(start: int) -> None:
    for seed in range(start, 3000 if start else 30):
        book = Book(seed)
        for _ in range(50):
            book.step()
        for name in list(book.live):
            book.end(name)
        book.manager.check_invariants()
        for window in book.windows:
            assert book.manager.num_allocated_blocks(window=window) == 0


# ---------------------------------------------------------------------- what it may take


class Matcher:
    """A store that has the tokens up to `end`, for loads beside computing."""

    def __init__(self, end: int) -> None:
        self.end = end

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        position = num_device_tokens // T * T
        return ExternalMatch(position, self.end - position, is_async=True, overlaps=True)

    def blocks_allocated(self, request: LlmRequest, block_ids: list[int]) -> None:
        pass


def windowed(window: int, chunk: int, num_blocks: int = 100) -> KVCacheManager:
    config = KvCacheConfig(tokens_per_block=T, enable_partial_reuse=False)
    layouts = [LAYOUT, replace(LAYOUT, window=window)]
    manager = KVCacheManager(config, layouts, num_blocks={None: 100, window: num_blocks})
    manager.expect_chunks(chunk)
    return manager


def loading(manager: KVCacheManager, number: int, num_tokens: int, end: int) -> LlmRequest:
    request = request_of(number, range(num_tokens), T, max_tokens=4)
    manager.set_external_matcher(Matcher(end))
    batch = ScheduledBatch([request])
    manager.prepare_resources(batch)
    assert batch.loading_requests == [request]
    return request


@pytest.mark.parametrize("matched", [0, 10])
@pytest.mark.parametrize("window", [1, 5, 8])
@pytest.mark.parametrize("chunk", [2, 6, 20])
def test_it_never_holds_more_than_what_is_counted(chunk: int, window: int, matched: int) -> None:
    """Once it has begun: what computing needs at most, and the blocks of the load."""
    manager = windowed(window, chunk)
    if matched:
        first = loading(manager, 0, matched + 1, matched)
        first.num_computed_tokens, first.load_end = matched, 0
        manager.free_resources(first)
    request = loading(manager, 1, 41, 38)
    assert request.num_computed_tokens == matched
    pool = {"window": window}
    ahead = 19 - max(matched // T, (38 - window + 1) // T)
    assert manager.needed_beside(request) == (0, ahead)
    at_first = manager.blocks.num_allocated_blocks(**pool)
    parked = manager.needed_blocks(request)
    most = at_first + parked[1] + ahead
    while request.num_computed_tokens < 38:
        end = min(request.num_computed_tokens + chunk, 38)
        assert manager.reserve_beside(request, end)
        assert manager.needed_beside(request) == (0, 0)
        held, needed = manager.blocks.num_allocated_blocks(**pool), manager.needed_blocks(request)
        assert held <= most
        most = min(most, held + needed[1])
        request.num_computed_tokens = end
        manager.update_resources(ScheduledBatch([request]))
    manager.free_resources(request)
    assert manager.blocks.num_allocated_blocks(**pool) == 0


def test_without_blocks_nothing_changes() -> None:
    manager = windowed(5, 4, num_blocks=4)
    request = loading(manager, 1, 41, 38)
    others = manager.blocks.num_free_blocks(window=5)
    manager.blocks.add_sequence(2, [500] * (T * others))
    before = manager.get_group_cache_indices([request], 1)
    assert not manager.reserve_beside(request, T)
    assert manager.get_group_cache_indices([request], 1) == before
    manager.blocks.check_invariants()


def test_two_windows_may_be_more_than_a_request_needs() -> None:
    request = request_of(1, [0] * 100, T)
    manager = windowed(30, 4)
    assert manager.fits_beside(request, 0, 90)
    assert not manager.fits_beside(request, 40, 90)
    assert windowed(30, 40).fits_beside(request, 40, 90)
    assert windowed(2, 4).fits_beside(request, 40, 90)


# ---------------------------------------------------------------------- states


def stateful(num_states: int) -> KVCacheManager:
    config = KvCacheConfig(tokens_per_block=T, max_tokens=200, state_interval=4)
    manager = KVCacheManager(config, [LAYOUT, STATES], num_blocks={None: 100, T: num_states})
    manager.expect_chunks(6)
    first = loading(manager, 0, 11, 10)  # leaves a snapshot at 10
    first.num_computed_tokens, first.load_end = 10, 0
    manager.free_resources(first)
    return manager


def test_the_snapshot_that_computing_begins_with_is_held_until_it_is_copied() -> None:
    manager = stateful(5)
    request = loading(manager, 1, 41, 38)
    assert manager.blocks.num_allocated_blocks(window=T) == 2
    assert manager.state_restore(request, 10) is not None
    assert manager.blocks.num_allocated_blocks(window=T) == 1
    assert manager.state_restore(request, 10) is None
    assert manager.needed_blocks(request)[1] == 0
    assert manager.needed_beside(request) == (0, 1)
    assert manager.reserve_beside(request, 12)
    assert (manager.needed_beside(request), manager.needed_blocks(request)[1]) == ((0, 0), 1)
    taken = [manager.state_snapshot(request, 12), manager.state_snapshot(request, 12)]
    assert taken[0] == taken[1]
    assert manager.blocks.num_allocated_blocks(window=T) == 2
    assert manager.needed_blocks(request)[1] == 0
    ids = manager.get_group_cache_indices([request], 1)[request.request_id]
    assert [number for number, block in enumerate(ids) if block >= 0] == [5, 18]
    assert manager.next_state_end(request, 36) == 38
    assert manager.state_snapshot(request, 38) == ids[18]
    manager.blocks.check_invariants()
    manager.free_resources(request)
    assert manager.blocks.num_allocated_blocks(window=T) == 0


def test_without_room_for_both_snapshots_a_request_waits_for_its_load() -> None:
    for num_states in (1, 2):
        manager = stateful(num_states)
        request = request_of(1, range(41), T)
        assert manager.fits_beside(request, 0, 38)
        assert manager.fits_beside(request, 10, 38) == (num_states == 2)
