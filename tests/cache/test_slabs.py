"""Pools that share an arena give each other memory."""

from __future__ import annotations

import re

import pytest
import torch

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.memory.sizing import pool_sizes
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout, StateTensor

T = 4
FULL = KvCacheLayout(1, 1, 1, 1, T, torch.float32)
WINDOW = KvCacheLayout(3, 1, 1, 1, T, torch.float32, 8)
STATES = KvCacheLayout.of_states([StateTensor(1, "conv", (5,), torch.float32)], T)
SIZES = (None, 8)


def manager_of(max_tokens, **settings):
    config = KvCacheConfig(tokens_per_block=T, max_tokens=max_tokens, **settings)
    return BlockManager(config, [FULL, WINDOW])


def sizes(manager):
    return [manager.max_blocks(window=window) for window in SIZES]


def held_bytes(manager):
    nbytes = {None: FULL.block_nbytes, 8: WINDOW.block_nbytes}
    return sum(manager.max_blocks(window=window) * nbytes[window] for window in SIZES)


def test_memory_is_shared_by_bytes_per_token_at_first():
    config = KvCacheConfig(tokens_per_block=T, max_tokens=160)
    shared = pool_sizes(config, [WINDOW, FULL])
    assert [layout.window for layout in shared.layouts] == [None, 8]
    assert shared.slabs.blocks_per_slab == (3, 1)
    assert shared.num_blocks == (39, 41)


def test_a_ratio_overrides_that():
    config = KvCacheConfig(tokens_per_block=T, max_tokens=160, pool_ratio=(0.75, 0.25))
    full, window = pool_sizes(config, [FULL, WINDOW]).num_blocks
    assert full * FULL.block_nbytes == pytest.approx(3 * window * WINDOW.block_nbytes, rel=0.2)


def test_a_prompt_longer_than_its_pool_takes_memory_of_the_other():
    manager = manager_of(160)
    before, nbytes = sizes(manager), held_bytes(manager)
    tokens = range(60 * T)
    assert manager.can_add(tokens, first_chunk=16)
    assert sizes(manager) == before  # asking changes nothing
    manager.add_sequence(0, tokens, first_chunk=16)
    assert sizes(manager)[0] >= 60
    assert held_bytes(manager) == nbytes
    manager.check_invariants()


@pytest.mark.parametrize("published", [0, 2 * T])
def test_what_only_a_pin_holds_stays_where_it_is(published):
    manager = manager_of(160)
    ids = manager.add_sequence(0, range(2 * T)).block_ids
    manager.commit(0, published)
    pin = manager.pin(0)
    manager.abort(0, 0)
    for request in range(1, 13):  # no slab has more blank blocks than the pinned one
        manager.add_sequence(request, [request] * 3 * T)
        manager.abort(request, 3 * T)
    assert manager.ensure_free([0, 51])  # all memory but the slab of the pinned blocks
    assert manager.max_blocks() == 3
    manager.check_invariants()
    if published:
        again = manager.add_sequence(99, [*range(2 * T), 0]).block_ids
        assert again.tolist()[:2] == ids.tolist()
        manager.abort(99, 0)
    manager.unpin(pin)
    assert manager.ensure_free([0, 54])
    manager.check_invariants()


def test_explicit_numbers_of_blocks_are_not_changed():
    config = KvCacheConfig(tokens_per_block=T)
    manager = BlockManager(config, [FULL, WINDOW], num_blocks={None: 4, 8: 40})
    assert not manager.can_add(range(5 * T), first_chunk=4)
    assert not manager.ensure_free([5, 0])


@pytest.mark.parametrize("ratio", [None, (0.9, 0.1)])
@pytest.mark.parametrize("layouts", [[FULL], [FULL, WINDOW], [FULL, STATES]])
def test_too_small_a_host_tier_is_told_the_least_size_with_a_block(layouts, ratio):
    def sized(nbytes):
        return pool_sizes(
            KvCacheConfig(
                tokens_per_block=T,
                host_cache_size=nbytes,
                pool_ratio=ratio if len(layouts) == 2 else None,
            ),
            layouts,
        ).num_host_blocks

    with pytest.raises(ConfigurationError, match=r"host_cache_size: 1 leaves") as refused:
        sized(1)
    [least] = map(int, re.findall(r"at least (\d+) bytes", str(refused.value)))
    assert max(sized(least)) == 1
    with pytest.raises(ConfigurationError, match=f"at least {least} bytes"):
        sized(least - 1)


def test_no_room_for_a_block_of_every_pool_names_the_limit():
    config = KvCacheConfig(tokens_per_block=T, max_gpu_total_bytes=FULL.block_nbytes)
    with pytest.raises(ConfigurationError, match="max_gpu_total_bytes"):
        pool_sizes(config, [FULL, WINDOW])
