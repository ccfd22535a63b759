"""The block manager: what scenarios.json does not say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from small_prompts import ROOT, chain_of

from kvconnect.cache.block_manager import BlockManager
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey, KeyChain
from kvconnect.layout import KvCacheLayout

T = 4
LAYOUT = KvCacheLayout(1, 1, 1, 1, T, torch.float32)
WINDOW = replace(LAYOUT, window=64)


def make(num_blocks=16, **settings):
    return BlockManager(
        KvCacheConfig(tokens_per_block=T, **settings), LAYOUT, num_blocks=num_blocks
    )


chain = partial(chain_of, size=T)


def publish(manager, request_id, tokens, **more):
    manager.add_sequence(request_id, tokens, **more)
    manager.abort(request_id, len(tokens))


def test_a_source_taken_over_from_the_host_comes_back_before_room_is_made_for_what_follows():
    """Its host block then takes the block that would be dropped else."""
    manager = BlockManager(
        KvCacheConfig(tokens_per_block=T, copy_on_partial_reuse=False),
        LAYOUT,
        num_blocks=2,
        num_host_blocks=1,
    )
    for request_id, tokens in enumerate([[1, 2], [5] * 5, [1, 9, 9, 9, 9]]):
        manager.add_sequence(request_id, tokens)
        manager.commit(request_id, len(tokens))
        manager.release(request_id)
    assert manager.match([5, 5, 5, 5, 0]) == 4


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("field", "settings", "layouts", "blocks"),
    [
        ("num_blocks", {}, [LAYOUT], {"num_blocks": 0}),
        ("num_blocks", {}, [LAYOUT], {"num_blocks": {None: 4, 64: 0}}),
        ("num_blocks", {}, [LAYOUT, WINDOW], {"num_blocks": {64: 4}}),
        ("num_blocks", {}, [LAYOUT, WINDOW], {"num_blocks": {None: 4, 64: 4, 32: 4}}),
        ("num_host_blocks", {}, [LAYOUT], {"num_blocks": 4, "num_host_blocks": -1}),
        ("pool_ratio", {"pool_ratio": (0.5, 0.5)}, [LAYOUT], {"num_blocks": 4}),
        ("tokens_per_block", {"tokens_per_block": 2 * T}, [LAYOUT], {"num_blocks": 4}),
    ],
)
def test_pools_that_do_not_fit_are_refused(field, settings, layouts, blocks):
    config = KvCacheConfig(**{"tokens_per_block": T} | settings)
    with pytest.raises(ConfigurationError, match=field):
        BlockManager(config, layouts, **blocks)


def test_one_layout_and_several_windows_make_a_pool_each():
    manager = make({8: 4, None: 5, 64: 6})
    assert [manager.max_blocks(window=window) for window in (None, 64, 8)] == [5, 6, 4]


def test_the_window_of_a_layout_is_that_of_its_pool():
    layout = replace(LAYOUT, window=T)
    manager = BlockManager(KvCacheConfig(tokens_per_block=T), layout, num_blocks=8)
    manager.add_sequence(0, range(20))
    manager.commit(0, 20)
    assert manager.block_ids(0).tolist()[:4] == [-1] * 4
    assert manager.block_ids(0, window=T).tolist() == manager.block_ids(0).tolist()
    assert manager.num_free_blocks() == 7


def test_there_is_no_pool_of_another_window():
    manager = make()
    for ask in (manager.num_free_blocks, manager.num_allocated_blocks, manager.max_blocks):
        with pytest.raises(ConfigurationError, match="window"):
            ask(window=64)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_matched": -1},
        {"first_chunk": 0},
        {"cache_salt": ""},
        {"keys": KeyChain(ROOT, 8, None)},
    ],
)
def test_bad_arguments_change_nothing(arguments):
    manager = make()
    with pytest.raises(ConfigurationError):
        manager.add_sequence(0, range(5), **arguments)
    assert manager.num_free_blocks() == 16
    manager.add_sequence(0, range(5))


def test_positions_outside_the_sequence_are_refused():
    manager = make()
    manager.add_sequence(0, range(5))
    for call in (manager.commit, manager.reserve, manager.abort):
        for position in (-1, 6):
            with pytest.raises(ValueError, match="outside"):
                call(0, position)
    with pytest.raises(ValueError, match="num_tokens"):
        manager.rewind(0, -1)
    with pytest.raises(ValueError, match="first_block"):
        manager.detach(0, 3)


def test_the_callers_array_may_change_afterwards():
    manager = make()
    tokens = np.arange(9, dtype=np.int32)
    manager.add_sequence(0, tokens)
    tokens[:] = 0
    manager.release(0)
    assert manager.match(range(9)) == 8


def test_ids_are_the_callers_own():
    manager = make()
    ids = manager.add_sequence(0, range(9)).block_ids
    assert ids.dtype == np.int32
    ids[:] = -7
    assert (manager.block_ids(0) >= 0).all()


# ---------------------------------------------------------------- reuse and publishing


def test_without_reuse_nothing_is_published_or_matched():
    manager = make(enable_block_reuse=False)
    manager.add_sequence(0, range(9))
    manager.commit(0, 9)
    assert manager.match(range(9)) == 0
    manager.release(0)
    assert manager.num_free_blocks() == 16
    assert manager.add_sequence(1, range(9)).matched_tokens == 0
    manager.check_invariants()


def test_a_run_does_not_grow_past_the_end_of_a_duplicate_published_under_it():
    manager = make()
    manager.add_sequence(0, range(12))
    manager.add_sequence(1, [*range(4), 50, 51, 52, 53])
    manager.commit(0, 4)
    # Its first block is a duplicate, what follows is published under the other's, which lives on.
    manager.abort(1, 8)
    manager.commit(0, 12)
    manager.check_invariants()
    assert manager.match([*range(4), 50, 51, 52, 53, 0]) == 8
    assert manager.match([*range(12), 0]) == 12


def test_a_detached_duplicate_no_longer_holds_back_what_follows():
    manager = make()
    manager.add_sequence(0, range(8))
    manager.add_sequence(1, range(8))
    manager.commit(0, 8)
    manager.commit(1, 8)  # a duplicate from block 0 on
    manager.abort(0, 8)
    handle = manager.detach(1, 0)
    manager.add_sequence(2, [9] * 4 * 12)  # reclaims the path
    assert manager.match([*range(8), 0]) == 0
    manager.commit(1, 8)
    assert manager.match([*range(8), 0]) == 8
    manager.unpin(handle)
    manager.check_invariants()


def test_a_partial_source_counts_where_the_window_needs_none_of_its_blocks():
    manager = BlockManager(
        KvCacheConfig(tokens_per_block=T), replace(LAYOUT, window=5), num_blocks=2
    )
    publish(manager, 0, [1, 2, 3, 4, 5])
    asked = {"tokens": [1, 2] + [9] * 10, "external_end": 9}
    if manager.can_add(**asked):
        manager.add_sequence(1, **asked)
        manager.release(1)
    manager.check_invariants()
    assert manager.num_free_blocks() == 2


def test_abort_publishes_nothing_beyond_what_it_says_is_valid():
    manager = make()
    manager.add_sequence(0, range(12))
    manager.add_sequence(1, range(12))
    manager.commit(0, 4)
    manager.commit(1, 12)  # its first block is a duplicate: all of it stays private
    manager.abort(0, 4)
    manager.abort(1, 6)
    assert manager.match([*range(12), 99]) == 4  # no tail of a block that was committed whole


def test_blocks_after_a_rewind_into_the_prompt_are_generated():
    manager = make()
    retention = KvCacheRetentionConfig(
        token_range_retention_configs=[{"token_start": 0, "priority": 80}],
        decode_retention_priority=20,
    )
    manager.add_sequence(0, range(16), retention=retention)
    manager.rewind(0, 9)
    manager.append_tokens(0, range(9))
    assert manager.priorities(0) == [80, 80, 20, 20]


def test_what_came_back_block_by_block_is_one_run_again():
    manager = BlockManager(
        KvCacheConfig(tokens_per_block=T), LAYOUT, num_blocks=16, num_host_blocks=16
    )
    for turn in range(4):
        publish(manager, turn, range(1000 * (turn % 2), 1000 * (turn % 2) + 64))
        assert len(list(manager._tree.segments())) <= 6


# ---------------------------------------------------------------- keys


def test_block_keys_are_the_chains():
    manager = make()
    keys = chain(range(9))
    manager.add_sequence(0, range(9), keys=keys)
    assert list(manager.block_keys(0)) == keys.keys()
    assert len(keys.keys()) == 2


def test_without_a_chain_keys_tell_paths_and_namespaces_apart():
    manager = make()
    manager.add_sequence(0, range(9))
    manager.add_sequence(1, range(9))
    manager.add_sequence(2, range(9), cache_salt="x")
    assert manager.block_keys(0) == manager.block_keys(1)
    assert not set(manager.block_keys(0)) & set(manager.block_keys(2))
    assert len(manager.block_keys(0)) == 2


def test_unknown_keys_pin_nothing():
    manager = make()
    publish(manager, 0, range(12), keys=chain(range(12)))
    for keys in ([], chain(range(50, 60)).keys(), chain(range(12)).keys()[1:]):
        pin = manager.pin_keys(keys)
        assert len(pin) == 0
        manager.unpin(pin)
    assert manager.num_free_blocks() == 16


def test_what_was_published_without_keys_is_found_once_a_request_brings_them():
    manager = make()
    publish(manager, 0, range(12))
    keys = chain(range(12))
    assert len(manager.pin_keys(keys.keys())) == 0
    manager.add_sequence(1, range(12), keys=keys)
    assert len(manager.pin_keys(keys.keys())) == 3
    manager.check_invariants()


# ---------------------------------------------------------------- no growth


def sizes(manager):
    """Of every container in the manager that could grow."""
    tree, pool = manager._tree, manager._pools[0]
    return {
        "sequences": len(manager._live),
        "pins": len(manager._pins),
        "roots": len(tree.roots),
        "index": len(tree.index._first),
        "blank": len(pool.private.blank),
        "candidates": len(pool.published.candidates.primary),
    }


def test_three_thousand_requests_leave_no_growth():
    manager = make(64)
    manager.unpin(manager.pin_keys([]))  # there is a key index from now on
    random = np.random.default_rng(1)
    queue = manager._pools[0].published.candidates.primary
    most_entries = 0
    for number in range(3_000):
        tokens = random.integers(0, 2, random.integers(1, 60)).astype(np.int32)
        salt = f"tenant {number}" if number % 3 == 0 else None
        keys = chain(tokens, root=BlockKey(number.to_bytes(32, "big")) if salt else ROOT)
        manager.add_sequence(number, tokens, cache_salt=salt, keys=keys)
        pin = manager.pin(number) if number % 5 == 0 else None
        manager.commit(number, len(tokens) // 2)
        manager.append_tokens(number, [1, 0])
        manager.release(number)
        if pin is not None:
            manager.unpin(pin)
        most_entries = max(most_entries, len(queue._line) + len(queue._heap) + len(queue._expiring))
    manager.check_invariants()
    assert most_entries < 64 + 8 * 64 + 2
    left = sizes(manager)
    assert left["sequences"] == left["pins"] == 0
    assert max(left.values()) <= 64, left
    manager.reset()
    assert manager.num_free_blocks() == 64
    assert manager._tree.roots == {}
