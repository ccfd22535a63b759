"""Sequences that compute the beginning of a prompt while a store fills its end, in window pools."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.cache.pool.matching import first_in_window
from kvconnect.config import KvCacheConfig
from kvconnect.errors import OutOfBlocks
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatch, LlmRequest, SamplingParams, ScheduledBatch

T = 2
LAYOUT = KvCacheLayout(1, 1, 1, 1, T, torch.float32)
WINDOWS = [[None, 7], [9], [None, 11, 4], [6, 3], [None, 1]]


class Sequence:
    """A live sequence, and how far it is computed and loaded."""

    def __init__(self, tokens: list[int], matched: int, load_end: int) -> None:
        self.tokens, self.computed, self.load_end = tokens, matched, load_end
        self.loaded_from = load_end
        self.pins: list[object] = []


class Book:
    """A manager, and what each of its blocks contains: the tokens up to the block's end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        windows = self.random.choice(WINDOWS)
        num_blocks = {window: self.random.choice([9, 14, 30]) for window in windows}
        if self.random.random() < 0.3:
            num_blocks = dict.fromkeys(windows, 60)
        config = KvCacheConfig(tokens_per_block=T, enable_partial_reuse=False)
        self.manager = BlockManager(config, LAYOUT, num_blocks=num_blocks)
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
        beside = end > matched and self.random.random() < 0.7
        more = {"external_end": end, "beside": True, "max_matched": matched} if beside else {}
        try:
            found = self.manager.add_sequence(name, tokens, first_chunk=4, **more)
        except OutOfBlocks:
            return
        self.live[name] = Sequence(tokens, found.matched_tokens, end if beside else 0)
        self.check_window(name, found.matched_tokens)

    def compute(self, name: int) -> None:
        """Computes a chunk, in whole blocks while a load runs; joins the load if it reaches it."""
        one = self.live[name]
        end = min(one.computed + self.random.randint(1, 4), len(one.tokens))
        if one.load_end:
            end = min(-(-end // T) * T, max(one.loaded_from, one.computed), len(one.tokens))
        try:
            self.manager.reserve(name, end)
        except OutOfBlocks:
            return
        self.check_window(name, one.computed)
        self.fill(name, range(one.computed // T, -(-end // T)), end)
        one.computed = end
        if one.load_end and end >= one.loaded_from:
            one.computed, one.load_end = max(end, one.load_end), 0
            self.check_window(name, one.computed)
        if self.random.random() < 0.1:
            self.end(name)
        else:
            self.manager.commit(name, one.computed)

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
        for group, window in enumerate(self.windows):
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
        for group, window in enumerate(self.windows):
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
    request = LlmRequest(
        number,
        np.arange(num_tokens, dtype=np.int32),
        chain_root=BlockKey(bytes(32)),
        tokens_per_block=T,
        sampling_params=SamplingParams(max_tokens=4),
    )
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
    request = LlmRequest(
        1, np.zeros(100, np.int32), chain_root=BlockKey(bytes(32)), tokens_per_block=T
    )
    manager = windowed(30, 4)
    assert manager.fits_beside(request, 0, 90)
    assert not manager.fits_beside(request, 40, 90)
    assert windowed(30, 40).fits_beside(request, 40, 90)
    assert windowed(2, 4).fits_beside(request, 40, 90)
