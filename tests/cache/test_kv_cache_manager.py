"""The resource manager that the engine drives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError, OutOfBlocks
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import (
    ExternalMatch,
    LlmRequest,
    RequestState,
    SamplingParams,
    ScheduledBatch,
)

T = 4
LAYOUT = KvCacheLayout(2, 2, 3, 3, T, torch.float32)
LATENT = KvCacheLayout(2, 1, 5, 0, T, torch.float32)
UNEQUAL = KvCacheLayout(2, 2, 5, 3, T, torch.float32)


def make_manager(num_blocks=16, layout=LAYOUT, **settings):
    config = KvCacheConfig(tokens_per_block=T, **settings)
    return KVCacheManager(config, [layout], num_blocks=num_blocks)


_numbers = itertools.count()


def make_request(prompt, max_tokens=8):
    return LlmRequest(
        next(_numbers),
        np.asarray(prompt, np.int32),
        chain_root=BlockKey(bytes(32)),
        tokens_per_block=T,
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


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


def test_a_later_chunk_allocates_nothing():
    manager = make_manager()
    request = make_request(range(10))
    batch = ScheduledBatch(context_requests=[request])
    manager.prepare_resources(batch)
    assert request.state is RequestState.CONTEXT
    assert request.num_computed_tokens == 0
    request.num_computed_tokens = 5
    manager.update_resources(batch)
    manager.prepare_resources(batch)
    assert batch.context_requests == [request]
    assert request.num_computed_tokens == 5
    assert manager.get_num_free_blocks() == 13


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


def test_a_rewind_drops_the_last_tokens():
    manager = make_manager()
    request = make_request(range(6))
    prefill(manager, request)
    request.draft_tokens = np.array([50, 51, 52], np.int32)
    manager.prepare_resources(ScheduledBatch(generation_requests=[request]))
    assert manager.get_num_free_blocks() == 13
    manager.rewind(request, 2)
    assert manager.blocks.num_tokens(request.request_id) == 8
    assert manager.get_num_free_blocks() == 14


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("prompt_len", range(1, 4 * T + 1))
def test_the_blocks_needed_to_completion_are_exact(prompt_len, max_tokens):
    manager = make_manager()
    request = make_request(range(prompt_len), max_tokens)
    needed = manager.get_needed_resource_to_completion(request)
    prefill(manager, request)
    while True:
        held = len(manager.blocks.block_ids(request.request_id))
        assert held + manager.get_needed_resource_to_completion(request) == needed
        if request.num_generated_tokens == max_tokens:
            break
        decode(manager, request, 901)
    assert manager.blocks.num_allocated_blocks() == needed


@pytest.mark.parametrize("num_drafts", [1, 3, T, 2 * T])
@pytest.mark.parametrize("prompt_len", range(1, 4 * T + 1))
def test_drafts_are_counted_in_the_blocks_needed(prompt_len, num_drafts):
    manager = make_manager(num_blocks=32)
    request = make_request(range(prompt_len), max_tokens=2)
    prefill(manager, request)
    request.draft_tokens = np.arange(num_drafts, dtype=np.int32)
    held = manager.blocks.num_allocated_blocks()
    needed = manager.get_needed_resource_to_completion(request)
    manager.prepare_resources(ScheduledBatch(generation_requests=[request]))
    assert manager.blocks.num_allocated_blocks() == held + needed


WINDOWS = [2, 3, T, T + 1, 2 * T, 3 * T + 1]


def most_held(manager, request, window, cuts, num_generated):
    """The most blocks of the pool of `window` that `request` holds until its end."""
    held = []

    def look():
        held.append(manager.blocks.num_allocated_blocks(window=window))

    for cut in cuts:
        manager.prepare_resources(ScheduledBatch(context_requests=[request]))
        look()
        request.num_computed_tokens += cut
        manager.update_resources(ScheduledBatch(context_requests=[request]))
    request.state = RequestState.GENERATION
    for _ in range(num_generated):
        request.append_tokens(np.array([900], np.int32))
        manager.prepare_resources(ScheduledBatch(generation_requests=[request]))
        look()
        request.num_computed_tokens = request.num_tokens
        manager.update_resources(ScheduledBatch(generation_requests=[request]))
    return max(held)


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
def test_the_blocks_that_a_window_needs_are_exact(window, num_generated):
    for prompt_len in range(1, 4 * T + 1):
        manager = windowed(window)
        request = make_request(range(prompt_len), max_tokens=num_generated + 1)
        needed = manager.needed_blocks(request)[1]
        assert most_held(manager, request, window, [prompt_len], num_generated) == needed


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    "chunk", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, T, T + 1))]
)
def test_the_blocks_that_a_window_needs_are_those_of_the_worst_chunks(window, chunk):
    for prompt_len in (T - 1, 2 * T, 2 * T + 1):
        request = make_request(range(prompt_len), max_tokens=2)
        needed = windowed(window, chunk).needed_blocks(request)[1]
        held = {
            most_held(windowed(window, chunk), make_request(range(prompt_len), 2), window, cuts, 1)
            for cuts in cuts_of(prompt_len, chunk)
        }
        assert max(held) == needed


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_drafts", [1, T, 2 * T])
def test_a_window_counts_drafts_too(window, num_drafts):
    for prompt_len in range(1, 4 * T + 1):
        manager = windowed(window)
        request = make_request(range(prompt_len), max_tokens=2)
        most_held(manager, request, window, [prompt_len], 0)
        request.append_tokens(np.array([900], np.int32))
        request.draft_tokens = np.arange(num_drafts, dtype=np.int32)
        held = manager.blocks.num_allocated_blocks(window=window)
        needed = manager.needed_blocks(request)[1]
        manager.prepare_resources(ScheduledBatch(generation_requests=[request]))
        assert manager.blocks.num_allocated_blocks(window=window) == held + needed


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


def test_the_pool_is_zeroed_aligned_and_seen_through_the_views():
    manager = make_manager(num_blocks=3)
    pool = manager.pool_tensor()
    assert pool.shape == LAYOUT.flat_shape(3)
    assert pool.is_contiguous()
    assert pool.data_ptr() % 4096 == 0
    assert not pool.any()
    buffers = manager.get_buffers(1)
    assert buffers.shape == (3, 2, T, 2, 3)
    buffers[2, 1, 3, 1, 2] = 7.0
    assert pool[2, 1, 1, -1] == 7.0


@pytest.mark.parametrize("layout", [UNEQUAL, LATENT])
def test_keys_and_values_of_different_size_are_two_views(layout):
    manager = make_manager(num_blocks=3, layout=layout)
    keys, values = manager.get_buffers(1)
    assert keys.shape == (3, T, layout.num_kv_heads, layout.key_dim)
    assert values.shape == (3, T, layout.num_kv_heads, layout.value_dim)
    keys[1] = 1.0
    values[1] = 2.0
    plane = manager.pool_tensor()[1, 1, 0]
    assert (plane[: keys[1].numel()] == 1.0).all()
    assert (plane[keys[1].numel() :] == 2.0).all()
    assert manager.pool_tensor()[:, 0].eq(0).all()


def test_a_foreign_handle_is_refused():
    with pytest.raises(ConfigurationError, match="handle"):
        make_manager().unpin(object())
