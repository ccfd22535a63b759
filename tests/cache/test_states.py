"""Snapshots of recurrent states: which ends get one, what a match needs, what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.cache.memory.sizing import pool_sizes
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout, StateTensor

T = 4
INTERVAL = 16
CONFIG = KvCacheConfig(tokens_per_block=T, state_interval=INTERVAL)
ATTENTION = KvCacheLayout(2, 1, 8, 8, T, torch.float32, layers=(0, 2))
TENSORS = (
    StateTensor(1, "conv", (3, 5), torch.bfloat16),
    StateTensor(1, "recurrent", (2, 4, 4), torch.float32),
    StateTensor(3, "conv", (3, 5), torch.bfloat16),
    StateTensor(3, "recurrent", (2, 4, 4), torch.float32),
)
STATES = KvCacheLayout.of_states(TENSORS, T)
GROUP = 1


def manager(states=8, blocks=64):
    return BlockManager(CONFIG, [ATTENTION, STATES], num_blocks={None: blocks, T: states})


def prompt(num_tokens, first=0):
    return list(range(first, first + num_tokens))


def ends_of(blocks, request_id, num_tokens):
    """Computes the sequence in the largest chunks allowed; returns where snapshots were taken."""
    taken, at = [], blocks._get(request_id).computed
    while at < num_tokens:
        end = min(blocks.next_state_end(request_id, at), num_tokens)
        if blocks.state_snapshot(request_id, end) is not None:
            taken.append(end)
        blocks.commit(request_id, end)
        blocks.check_invariants()
        at = end
    return taken


def serve(blocks, tokens, answer=()):
    request_id = len(blocks._live) + 1000
    matched = blocks.add_sequence(request_id, tokens).matched_tokens
    taken = ends_of(blocks, request_id, len(tokens))
    for token in answer:
        blocks.append_tokens(request_id, [token])
        taken += ends_of(blocks, request_id, blocks.num_tokens(request_id))
    blocks.abort(request_id, blocks.num_tokens(request_id))
    blocks.check_invariants()
    return matched, taken


def test_a_snapshot_is_taken_at_every_interval_and_at_the_end_of_the_prompt():
    assert serve(manager(), prompt(39)) == (0, [16, 32, 36])


def test_a_repeat_of_a_prompt_of_whole_blocks_matches_all_but_the_last_block():
    blocks = manager()
    assert serve(blocks, prompt(40)) == (0, [16, 32, 36, 40])
    assert blocks.match(prompt(40)) == 36


def test_a_longer_prompt_matches_up_to_the_last_snapshot():
    blocks = manager()
    serve(blocks, prompt(39))
    assert blocks.match(prompt(80)) == 36
    assert blocks.match(prompt(35)) == 32
    assert blocks.match(prompt(31)) == 16
    assert blocks.match(prompt(15)) == 0


def test_the_next_turn_matches_the_answer():
    blocks = manager()
    answer = prompt(30, 500)
    serve(blocks, prompt(10), answer)
    turn = [*prompt(10), *answer]
    assert blocks.match([*turn, 1, 2, 3]) == 40
    # Of the snapshots in the answer only the last one stays, and those of every interval.
    assert [end for end in range(1, 40) if blocks.match(turn[: end + 1]) == end] == [8, 16, 32]


def test_a_prompt_that_leaves_a_cached_path_leaves_a_snapshot_there():
    blocks = manager()
    serve(blocks, prompt(39))
    fork = [*prompt(28), *prompt(20, 900)]
    assert blocks.match(fork) == 16
    assert blocks.add_sequence(1, fork).no_state_tokens == 12
    blocks.abort(1, 0)
    matched, taken = serve(blocks, fork)
    assert (matched, taken) == (16, [28, 32, 44, 48])
    assert blocks.num_no_state_tokens() == 24
    assert blocks.match([*prompt(28), 1, 1]) == 28


def test_attention_and_states_must_both_reach():
    blocks = manager(blocks=10)
    serve(blocks, prompt(39))
    blocks.add_sequence(1, prompt(24, 700))  # reclaims the last blocks of the path's attention
    matched = blocks.match(prompt(80))
    assert matched in (0, 16)
    assert blocks.num_allocated_blocks(window=T) == 0


def test_a_match_holds_its_snapshot_until_the_next_one():
    blocks = manager(states=1)
    serve(blocks, prompt(17))
    assert blocks.add_sequence(1, prompt(26)).matched_tokens == 16
    block = blocks.state_restore(1, 16)
    assert list(blocks.block_ids(1, window=T)) == [-1, -1, -1, block, -1, -1, -1]
    assert blocks.num_free_blocks(window=T) == 0
    assert blocks.add_sequence(2, prompt(9, 300)).matched_tokens == 0
    assert blocks.state_snapshot(2, 8) is None, "no block is free, and computing goes on"
    blocks.commit(2, 9)
    assert blocks.state_snapshot(1, 24) is not None
    assert blocks.state_restore(1, 16) is None
    blocks.commit(1, 24)
    assert blocks.state_restore(1, 24) is not None
    blocks.check_invariants()


def test_a_second_call_for_one_end_names_the_same_block():
    blocks = manager()
    blocks.add_sequence(1, prompt(20))
    block = blocks.state_snapshot(1, 8)
    assert blocks.state_snapshot(1, 8) == block
    assert blocks.next_state_end(1, 0) == 8, "the block is not written: no chunk passes it"
    blocks.abort(1, 12)  # the step was discarded
    assert blocks.match(prompt(20)) == 0
    assert blocks.num_free_blocks(window=T) == 8


def test_a_snapshot_with_rejected_drafts_is_dropped():
    blocks = manager()
    blocks.add_sequence(1, prompt(13))
    blocks.commit(1, 13)
    blocks.append_tokens(1, [1, 2, 3])
    assert blocks.state_snapshot(1, 16) is not None
    blocks.rewind(1, 2)
    blocks.append_tokens(1, [4, 5, 6])
    blocks.commit(1, 16)
    assert blocks.match([*prompt(13), 1, 4, 5, 6, 7]) == 0
    blocks.check_invariants()


@pytest.mark.parametrize(("position", "reason"), [(4, "committed"), (24, "outside")])
def test_a_snapshot_of_the_past_or_the_future_is_refused(position, reason):
    blocks = manager()
    blocks.add_sequence(1, prompt(20))
    blocks.commit(1, 6)
    with pytest.raises(ConfigurationError, match=reason):
        blocks.state_snapshot(1, position)
    assert blocks.state_snapshot(1, 7) is None, "inside of a block there is no state"


def test_a_store_fills_the_snapshot_at_the_end_of_its_match():
    blocks = manager()
    blocks.add_sequence(1, prompt(30), max_matched=0, external_end=24)
    block = blocks.state_restore(1, 24)
    assert list(blocks.block_ids(1, window=T)) == [-1] * 5 + [block] + [-1] * 2
    blocks.commit(1, 24)
    blocks.release(1)
    assert blocks.match(prompt(30)) == 24
    with pytest.raises(ConfigurationError, match="external_end"):
        blocks.add_sequence(2, prompt(30, 60), external_end=22)


def test_a_cache_without_states_has_no_ends():
    blocks = BlockManager(CONFIG, ATTENTION, num_blocks=8)
    blocks.add_sequence(1, prompt(9))
    assert blocks.next_state_end(1, 0) is None
    assert blocks.state_restore(1, 0) is None
    assert blocks.state_snapshot(1, 8) is None


def test_the_tensors_of_a_state_are_views_of_its_block():
    cache = KVCacheManager(CONFIG, [STATES, ATTENTION], num_blocks={None: 4, T: 3})
    pool = cache.pool_tensor(GROUP)
    for layer in (1, 3):
        states = cache.get_states(layer)
        assert {name: (one.shape, one.dtype) for name, one in states.items()} == {
            "conv": ((3, 3, 5), torch.bfloat16),
            "recurrent": ((3, 2, 4, 4), torch.float32),
        }
        for one in states.values():
            one[1].fill_(1.0)
    assert not pool[0].any()
    assert not pool[2].any()
    elements = 2 * (3 * 5 + 2 * 4 * 4)
    assert np.count_nonzero(pool[1].numpy()) == 2 * elements, "two bytes of 1.0 are not zero"
    with pytest.raises(ConfigurationError, match="layer 0 has no states"):
        cache.get_states(0)


def test_memory_is_shared_out_by_the_bytes_of_an_interval():
    large = KvCacheLayout.of_states([StateTensor(1, "recurrent", (1024,), torch.float32)], T)
    config = KvCacheConfig(tokens_per_block=T, state_interval=1024, max_gpu_total_bytes=1 << 20)
    sizes = pool_sizes(config, [ATTENTION, large])
    assert sizes.slabs is not None, "states share the slabs with the other pools"
    static = pool_sizes(
        config.model_copy(update={"max_gpu_total_bytes": 15_000}), [ATTENTION, large]
    )
    assert static.num_blocks[1] == 2
    assert static.num_blocks[0] == (15_000 - 2 * large.block_nbytes) // ATTENTION.block_nbytes
    by_tokens = pool_sizes(
        KvCacheConfig(tokens_per_block=T, state_interval=16, max_tokens=160), [ATTENTION, STATES]
    )
    assert by_tokens.num_blocks[0] >= 40
    assert by_tokens.num_blocks[1] >= 8


@pytest.mark.parametrize(
    ("config", "layouts", "field"),
    [
        (
            KvCacheConfig(tokens_per_block=T, state_interval=6),
            [ATTENTION, STATES],
            "state_interval",
        ),
        (CONFIG, [STATES, STATES], "layout"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, layouts, field):
    with pytest.raises(ConfigurationError, match=field):
        BlockManager(config, layouts, num_blocks=4)
