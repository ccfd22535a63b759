"""The resource manager that the engine drives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from small_prompts import request_of

from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError, OutOfBlocks
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatch, RequestState, ScheduledBatch

T = 4
LAYOUT = KvCacheLayout(2, 2, 3, 3, T, torch.float32)


def make_manager(num_blocks=16):
    return KVCacheManager(KvCacheConfig(tokens_per_block=T), [LAYOUT], num_blocks=num_blocks)


_numbers = itertools.count()


def make_request(prompt, max_tokens=8):
    return request_of(next(_numbers), prompt, T, max_tokens=max_tokens)


def prefill(manager, request):
    """Admit `request`, say its prompt was computed, and sample a token."""
    batch = ScheduledBatch(context_requests=[request])
    manager.prepare_resources(batch)
    assert batch.context_requests == [request]
    request.num_computed_tokens = request.num_tokens
    manager.update_resources(batch)
    request.append_tokens(np.array([900], np.int32))
    request.state = RequestState.GENERATION


def decode(manager, request, token):
    """One step of generation."""
    batch = ScheduledBatch(generation_requests=[request])
    manager.prepare_resources(batch)
    request.num_computed_tokens = request.num_tokens
    manager.update_resources(batch)
    request.append_tokens(np.array([token], np.int32))


def run(manager, request, tokens):
    prefill(manager, request)
    for token in tokens:
        decode(manager, request, token)


class Matcher:
    """An external store that has what it is told."""

    def __init__(self, match):
        self.match = match
        self.asked = []
        self.allocated = []

    def match_external(self, request, num_device_tokens):
        self.asked.append((request, num_device_tokens))
        return self.match

    def blocks_allocated(self, request, block_ids):
        self.allocated.append((request, block_ids))


def test_what_does_not_fit_is_refused_and_unchanged():
    manager = make_manager(num_blocks=2)
    request = make_request(range(9))
    batch = ScheduledBatch(context_requests=[request])
    manager.prepare_resources(batch)
    assert batch.context_requests == []
    assert batch.refused_requests == [request]
    assert request.state is RequestState.QUEUED
    assert manager.get_num_free_blocks() == 2


def test_generation_without_room_raises_and_changes_nothing():
    manager = make_manager(num_blocks=1)
    request = make_request(range(T))
    prefill(manager, request)
    with pytest.raises(OutOfBlocks):
        manager.prepare_resources(ScheduledBatch(generation_requests=[request]))
    assert manager.blocks.num_tokens(request.request_id) == T


def test_rejected_drafts_give_way_to_what_was_sampled():
    manager = make_manager()
    request = make_request(range(6))
    prefill(manager, request)
    request.draft_tokens = np.array([50, 51, 52], np.int32)
    batch = ScheduledBatch(generation_requests=[request])
    manager.prepare_resources(batch)
    assert manager.blocks.tokens(request.request_id).tolist() == [*range(6), 900, 50, 51, 52]
    # 50 was accepted, 60 sampled instead of 51.
    request.append_tokens(np.array([50, 60], np.int32))
    request.num_computed_tokens = 8
    request.draft_tokens = np.empty(0, np.int32)
    manager.update_resources(batch)
    manager.prepare_resources(batch)
    assert manager.blocks.tokens(request.request_id).tolist() == [*range(6), 900, 50, 60]
    manager.free_resources(request)
    assert manager.blocks.match([*range(6), 900, 50, 60, 1]) == 8
    assert manager.blocks.match([*range(6), 900, 50, 51, 1]) == 8


WINDOWS = [2, 3, T, T + 1, 2 * T, 3 * T + 1]


def held_by_pool(manager):
    return [manager.blocks.num_allocated_blocks(window=one.window) for one in manager.layouts]


def most_held(manager, request, cuts, num_generated):
    """The most blocks of each pool that `request` holds until its end."""
    held, needed = [], manager.needed_blocks(request)
    for cut in cuts:
        manager.prepare_resources(ScheduledBatch(context_requests=[request]))
        held.append(held_by_pool(manager))
        request.num_computed_tokens += cut
        manager.update_resources(ScheduledBatch(context_requests=[request]))
    request.state = RequestState.GENERATION
    for _ in range(num_generated):
        request.append_tokens(np.array([900], np.int32))
        assert held_by_pool(manager)[0] + manager.needed_blocks(request)[0] == needed[0]
        manager.prepare_resources(ScheduledBatch(generation_requests=[request]))
        held.append(held_by_pool(manager))
        request.num_computed_tokens = request.num_tokens
        manager.update_resources(ScheduledBatch(generation_requests=[request]))
    return tuple(map(max, zip(*held, strict=True)))


def cuts_of(num_tokens, longest):
    """Every way of computing so many tokens in chunks."""
    if num_tokens == 0:
        yield ()
    for first in range(1, min(longest, num_tokens) + 1):
        for rest in cuts_of(num_tokens - first, longest):
            yield (first, *rest)


def windowed(window, chunk=None):
    layouts = [KvCacheLayout(1, 1, 1, 1, T, torch.float32, w) for w in (None, window)]
    config = KvCacheConfig(tokens_per_block=T, enable_block_reuse=False)
    manager = KVCacheManager(config, layouts, num_blocks={None: 16, window: 16})
    if chunk is not None:
        manager.expect_chunks(chunk)
    return manager


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_generated", [0, 1, T, 3 * T])
def test_the_blocks_needed_to_completion_are_exact(window, num_generated):
    for prompt_len in range(1, 4 * T + 1):
        manager = windowed(window)
        request = make_request(range(prompt_len), max_tokens=num_generated + 1)
        needed = manager.needed_blocks(request)
        assert most_held(manager, request, [prompt_len], num_generated) == needed


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "chunk", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, T, T + 1))]
)
def test_the_blocks_needed_are_those_of_the_worst_chunks(window, chunk):
    for prompt_len in (T - 1, 2 * T, 2 * T + 1):
        request = make_request(range(prompt_len), max_tokens=2)
        needed = windowed(window, chunk).needed_blocks(request)
        held = {
            most_held(windowed(window, chunk), make_request(range(prompt_len), 2), cuts, 1)
            for cuts in cuts_of(prompt_len, chunk)
        }
        assert tuple(map(max, zip(*held, strict=True))) == needed


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_drafts", [1, T, 2 * T])
def test_drafts_are_counted_in_the_blocks_needed(window, num_drafts):
    for prompt_len in range(1, 4 * T + 1):
        manager = windowed(window)
        request = make_request(range(prompt_len), max_tokens=2)
        most_held(manager, request, [prompt_len], 0)
        request.append_tokens(np.array([900], np.int32))
        request.draft_tokens = np.arange(num_drafts, dtype=np.int32)
        both = zip(held_by_pool(manager), manager.needed_blocks(request), strict=True)
        expected = [held + needed for held, needed in both]
        manager.prepare_resources(ScheduledBatch(generation_requests=[request]))
        assert held_by_pool(manager) == expected


def test_without_external_tokens_the_matcher_learns_of_the_blocks():
    manager = make_manager()
    matcher = Matcher(ExternalMatch())
    manager.set_external_matcher(matcher)
    request = make_request(range(6))
    manager.prepare_resources(ScheduledBatch(context_requests=[request]))
    ids = manager.get_batch_cache_indices([request])[request.request_id]
    assert matcher.asked == [(request, 0)]
    assert matcher.allocated == [(request, ids)]
    assert request.num_external_tokens == 0


def test_what_a_store_fills_in_this_step_counts_from_the_start():
    manager = make_manager()
    warm = make_request(range(6))
    prefill(manager, warm)
    manager.free_resources(warm)
    # On the device are a block and a part of the next; the store goes on at the block's boundary.
    matcher = Matcher(ExternalMatch(position=4, num_tokens=8))
    manager.set_external_matcher(matcher)
    request = make_request(range(20))
    manager.prepare_resources(ScheduledBatch(context_requests=[request]))
    assert matcher.asked == [(request, 6)]
    assert request.num_computed_tokens == request.reused_device_tokens == 4
    assert request.num_external_tokens == 12
    assert request.state is RequestState.CONTEXT


def test_a_matcher_is_told_only_of_what_the_device_can_really_give():
    manager = make_manager(num_blocks=3)
    first = make_request(range(11))
    run(manager, first, [])
    manager.free_resources(first)
    matcher = Matcher(ExternalMatch(8))
    manager.set_external_matcher(matcher)
    # The last block shares tokens with a published tail, for whose copy there is no room.
    request = make_request([*range(10), 70])
    manager.prepare_resources(ScheduledBatch(context_requests=[request]))
    assert matcher.asked == [(request, 8)]
    assert request.num_computed_tokens == 8


def test_a_request_that_loads_in_the_background_is_parked_with_its_blocks():
    manager = make_manager()
    manager.set_external_matcher(Matcher(ExternalMatch(0, 8, is_async=True)))
    request = make_request(range(10))
    batch = ScheduledBatch(context_requests=[request])
    manager.prepare_resources(batch)
    assert batch.context_requests == []
    assert batch.loading_requests == [request]
    assert request.state is RequestState.LOADING
    assert manager.get_num_free_blocks() == 13


def test_a_failed_load_detaches_what_may_still_be_written_to():
    manager = make_manager()
    manager.set_external_matcher(Matcher(ExternalMatch(0, 8, is_async=True)))
    request = make_request(range(10))
    manager.prepare_resources(ScheduledBatch(context_requests=[request]))
    before = manager.get_batch_cache_indices([request])[request.request_id]
    handle = manager.detach(request, 1)
    after = manager.get_batch_cache_indices([request])[request.request_id]
    assert after[0] == before[0]
    assert not set(after[1:]) & set(before)
    manager.free_resources(request)
    assert manager.get_num_free_blocks() == 14
    manager.unpin(handle)
    assert manager.get_num_free_blocks() == 16


def test_a_padding_request_holds_a_block_and_publishes_nothing():
    manager = make_manager()
    manager.add_padding_request(77)
    assert manager.get_num_free_blocks() == 15
    manager.blocks.release(77)
    assert manager.get_num_free_blocks() == 16
    assert manager.blocks.match([0, 0]) == 0


def test_priorities_are_those_of_the_blocks():
    manager = make_manager()
    request = make_request(range(10))
    prefill(manager, request)
    assert manager.get_priorities(request) == [35, 35, 35]
    assert manager.get_priorities(request, 2) == [35]


def test_a_foreign_handle_is_refused():
    with pytest.raises(ConfigurationError, match="handle"):
        make_manager().unpin(object())
