"""Orders to save: what a scheduler tells of blocks in a row is what workers make of it."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.connector.pair.save_plan import SavePlan
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest

SIZE = 4
ROOT = BlockKey(b"r" * 32)
PRIORITY = 35


def request(num_blocks):
    tokens = np.arange(SIZE * num_blocks + 1, dtype=np.int32)
    return LlmRequest(7, tokens, chain_root=ROOT, tokens_per_block=SIZE)


def plan(of, windows=(None,), ids=None):
    """A plan that has all blocks of `of`; those of group g are number + 100 * g."""
    num_blocks = of.num_tokens // SIZE
    every = [[100 * g + n for n in range(num_blocks)] for g in range(len(windows))]
    found = SavePlan(of, windows=windows)
    found.extend(ids or every, [PRIORITY] * num_blocks)
    return found


def check(of, blocks, group=0):
    """Every one of `blocks` is what its number says."""
    keys = [ROOT, *of.key_chain.keys()]
    for block in blocks:
        n = block.number
        assert (block.key, block.parent) == (keys[n + 1], keys[n])
        assert block.tokens.tolist() == list(range(n * SIZE, (n + 1) * SIZE))
        assert (block.block_id, block.priority) == (100 * block.group + n, PRIORITY)
        assert block.group == group


@given(num_blocks=st.integers(1, 12), data=st.data())
def test_blocks_in_a_row_are_each_what_its_number_says(num_blocks, data):
    of = request(num_blocks)
    stored = data.draw(st.integers(0, num_blocks - 1))
    saves = plan(of)
    saves.note_stored([stored])
    order = saves.order(num_blocks, 0)
    assert order is not None
    assert [block.number for block in order.blocks] == list(range(stored, num_blocks))
    assert len(order.blocks) == num_blocks - stored
    check(of, order.blocks)
    some = data.draw(st.slices(len(order.blocks)))
    check(of, order.blocks[some])
    assert [one.number for one in order.blocks[some]] == list(range(stored, num_blocks))[some]
    assert order.blocks[-1].number == num_blocks - 1
    assert saves.order(num_blocks, 0) is None


def test_an_order_tells_workers_one_key_and_the_tokens_of_a_block_and_little_more():
    of = request(128)
    saves = plan(of)
    saves.note_stored([0])
    order = saves.order(128, 0)
    told = pickle.dumps(order)
    assert len(told) <= 128 * (32 + 4 * SIZE + 12) + 512
    check(of, pickle.loads(told).blocks)


def test_what_is_told_stays_when_tokens_are_taken_back():
    of = request(2)
    of.append_tokens(np.arange(2 * SIZE + 1, 3 * SIZE, dtype=np.int32))  # generated ones
    saves = plan(of)
    saves.note_stored([0])
    order = saves.order(3, 0)
    as_told = tuple(order.blocks)
    of.rewind(2 * SIZE)
    of.append_tokens(np.full(2 * SIZE, 9, np.int32))
    assert [one.key for one in order.blocks] == [one.key for one in as_told]
    assert order.blocks[2].tokens.tolist() == list(range(2 * SIZE, 3 * SIZE))


def test_a_window_s_gaps_are_left_out():
    of = request(6)
    saves = plan(of, windows=(6 * SIZE,), ids=[[0, -1, 2, 3, -1, 5]])
    order = saves.order(6, 0)
    assert [block.number for block in order.blocks] == [0, 2, 3, 5]
    check(of, order.blocks)


def test_blocks_of_several_groups_go_by_number():
    of = request(3)
    saves = plan(of, windows=(None, None))
    saves.note_stored([0, 1])
    order = saves.order(3, 0)
    assert [(b.number, b.group) for b in order.blocks] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
    check(of, [block for block in order.blocks if block.group == 1], group=1)


def test_a_full_block_that_is_stored_as_the_tail_is_not_saved_again():
    of = request(2)
    saves = plan(of)
    saves.note_stored([1], of.key_chain.keys()[1])
    assert saves.order(2, 0) is None
