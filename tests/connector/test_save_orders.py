"""Orders to save: what a scheduler tells of blocks in a row is what workers make of it."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from bench_engine import T, llm_args, new_request
from hypothesis import given
from hypothesis import strategies as st
from stores import DictStore

from kvconnect.connector.data import RequestData, SchedulerOutput
from kvconnect.connector.io.orders import BlockRun
from kvconnect.connector.offload import OffloadScheduler
from kvconnect.connector.pair.held_saves import HeldSaves
from kvconnect.connector.pair.save_plan import SavePlan
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout, StateTensor
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


def test_blocks_that_a_window_may_have_freed_are_not_saved():
    """Their ids stay as they were reported, and other requests may have the blocks."""
    of = request(6)
    saves = plan(of, windows=(2 * SIZE,))
    order = saves.order(6, 5 * SIZE)
    assert [block.number for block in order.blocks] == [3, 4, 5]


def test_of_what_is_held_valid_blocks_alone_are_saved():
    held = HeldSaves([KvCacheLayout(1, 1, 4, 4, SIZE, torch.float32)])
    saves = plan(request(3))
    saves.note_stored([0])
    held.add(saves.order(3, 0))
    order = held.take(7, 3 * SIZE - 1)
    assert [block.number for block in order.blocks] == [0, 1]


def test_held_blocks_whose_tokens_are_taken_back_are_forgotten():
    scheduler = OffloadScheduler(llm_args(DictStore(), save_on="finish"))
    try:
        of = new_request(1, list(range(3 * T + 1)))
        scheduler.on_new_request(of)
        ids = [5, 6, 7, 8]
        data = RequestData(1, of.get_tokens(0), ids, 0, 3 * T + 1, priorities=[PRIORITY] * 4)
        scheduler._finding._prompts[1].lookup.exception(60)
        scheduler.build_connector_meta(SchedulerOutput([data]))
        assert scheduler._plans[1].num_held == 3
        of.rewind(2 * T + 1)
        scheduler.on_rewind(of, ids[:3])
        assert scheduler.build_idle_meta().forgotten == (1,)
        assert scheduler._plans[1].num_held == 0
    finally:
        scheduler.shutdown()


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


# ---------------------------------------------------------------------- snapshots of states


def with_states(num_blocks=12, prompt_blocks=4, interval=3):
    """A plan of a prompt and its answer, with keys and values that the store has."""
    tokens = np.arange(SIZE * prompt_blocks + 1, dtype=np.int32)
    of = LlmRequest(7, tokens, chain_root=ROOT, tokens_per_block=SIZE)
    of.append_tokens(np.arange(len(tokens), SIZE * num_blocks + 1, dtype=np.int32))
    saves = SavePlan(of, windows=(None, SIZE), states={1}, state_interval=interval * SIZE)
    saves.note_stored([num_blocks, 0])
    return saves


def snapshot(saves, number, block_id):
    """A step takes the snapshot behind block `number`; returns what it saves."""
    known = saves.num_blocks
    saves.extend(
        [list(range(known, number + 1)), [-1] * (number - known) + [block_id]],
        [PRIORITY] * (number + 1 - known),
    )
    is_due, order = saves.is_due(number + 1), saves.order(number + 1, 0)
    assert is_due == (order is not None)
    return [] if order is None else [(one.number, one.block_id) for one in order.blocks]


def at_the_end(saves, num_full):
    order = saves.order(num_full, 0, ends=True)
    return [] if order is None else [(one.number, one.block_id) for one in order.blocks]


def test_snapshots_of_the_prompt_and_of_intervals_are_saved_and_the_last_one():
    saves = with_states()
    assert snapshot(saves, 1, 41) == [(1, 41)]
    assert snapshot(saves, 3, 42) == [(3, 42)]
    assert snapshot(saves, 4, 43) == []  # in the answer
    assert snapshot(saves, 5, 44) == [(5, 44)]
    assert snapshot(saves, 6, 45) == []
    assert at_the_end(saves, 7) == [(6, 45)]
    assert at_the_end(saves, 7) == []


def test_a_snapshot_whose_block_was_freed_is_never_saved():
    saves = with_states()
    assert snapshot(saves, 4, 43) == []
    assert snapshot(saves, 6, -1) == []  # its block is free, and there was none for the next
    assert at_the_end(saves, 7) == []
    saves.note_missing(0)
    assert at_the_end(saves, 5) == [(n, n) for n in range(5)]  # keys and values


def test_a_snapshot_before_the_end_of_a_load_is_not_saved_once_the_load_is_joined():
    """The request ends before its next step reports the loaded one."""
    for committed, saved in ((3 * SIZE, [(1, 41)]), (4 * SIZE, [])):
        saves = with_states()
        saves.note_stored([12, 4])
        saves.load_end = 4 * SIZE
        assert snapshot(saves, 1, 41) == []
        saves.note_missing(0)  # the load has failed
        order = saves.order(committed // SIZE, committed, ends=True)
        assert [(one.number, one.block_id) for one in order.blocks if one.group] == saved


def test_a_snapshot_of_tokens_that_are_not_computed_is_not_saved():
    saves = with_states()
    assert snapshot(saves, 4, 43) == []
    assert at_the_end(saves, 4) == []


def test_snapshots_are_not_held_until_their_request_ends():
    states = KvCacheLayout.of_states([StateTensor(1, "recurrent", (4,), torch.float32)], SIZE)
    keys = KvCacheLayout(1, 1, 4, 4, SIZE, torch.float32)
    held = HeldSaves([keys, states])
    saves = with_states(num_blocks=8)
    saves.note_missing(0)
    saves.extend([[0, 1], [-1, 41]], [PRIORITY] * 2)
    now = held.add(saves.order(2, 0))
    assert now is not None
    assert [(one.group, one.number) for one in now.blocks] == [(1, 1)]
    saves.extend([[2, 3, 4], [-1, -1, 42]], [PRIORITY] * 3)
    rest = saves.order(5, 0, ends=True)
    # Tokens of a block that is not full: a window of a block would not reach back so far.
    order = held.take(7, 6 * SIZE - 1, rest)
    assert order is not None
    assert [(one.group, one.number) for one in order.blocks] == [
        *((0, n) for n in range(4)),
        *((0, 4), (1, 4)),
    ]


def test_of_an_order_of_snapshots_alone_nothing_is_kept():
    """No order of its end might take it: then it would stay for ever."""
    states = KvCacheLayout.of_states([StateTensor(1, "recurrent", (4,), torch.float32)], SIZE)
    held = HeldSaves([KvCacheLayout(1, 1, 4, 4, SIZE, torch.float32), states])
    saves = with_states(num_blocks=8)
    saves.note_stored([2, 0])
    saves.extend([[0, 1], [-1, 41]], [PRIORITY] * 2)
    now = held.add(saves.order(2, 0))
    assert now is not None
    assert [(one.group, one.number) for one in now.blocks] == [(1, 1)]
    assert len(held) == 0


def test_without_states_a_run_of_blocks_that_are_held_is_not_divided(monkeypatch):
    """A prompt has thousands of them, and the step waits for the scheduler."""
    scheduler = OffloadScheduler(llm_args(DictStore(), save_on="finish"))
    try:
        one = new_request(1, list(range(6 * T + 1)))
        scheduler.on_new_request(one)
        assert scheduler.get_num_new_matched_tokens(one, 0) == (0, False)
        step = SchedulerOutput()
        step.new_requests.append(
            RequestData(1, [], list(range(7)), 0, 6 * T + 1, (), priorities=[PRIORITY] * 7)
        )
        monkeypatch.setattr(BlockRun, "__iter__", None)
        (order,) = scheduler.build_connector_meta(step).saves
        assert len(order.blocks) == 6
        assert scheduler._plans[1].num_held == 6
    finally:
        scheduler.shutdown()


def test_a_snapshot_is_wanted_as_its_own_block_is():
    """Blocks before it that are stored need not be: their priority says nothing any more."""
    tokens = np.arange(SIZE * 6 + 1, dtype=np.int32)
    of = LlmRequest(7, tokens, chain_root=ROOT, tokens_per_block=SIZE)
    saves = SavePlan(of, windows=(None, SIZE), states={1}, min_priority=50)
    saves.note_stored([4, 0])
    saves.extend([[0, 1, 2, 3], [-1, -1, -1, 41]], [35, 80, 80, 80])
    order = saves.order(4, 0)
    assert [(one.group, one.block_id) for one in order.blocks] == [(1, 41)]
    saves.extend([[4, 5], [-1, 42]], [80, 80])
    assert saves.is_due(6)
    order = saves.order(6, 4 * SIZE)
    assert [(one.group, one.block_id) for one in order.blocks] == [(0, 4), (0, 5), (1, 42)]


def test_a_snapshot_behind_a_block_that_is_not_saved_is_not_saved_either():
    """The store would not find it."""
    tokens = np.arange(SIZE * 6 + 1, dtype=np.int32)
    of = LlmRequest(7, tokens, chain_root=ROOT, tokens_per_block=SIZE)
    saves = SavePlan(of, windows=(None, SIZE), states={1}, min_priority=50)
    saves.note_stored([0, 0])
    saves.extend([[0, 1, 2, 3], [-1, -1, -1, 41]], [80, 35, 80, 80])
    order = saves.order(4, 0)
    assert [(one.group, one.block_id) for one in order.blocks] == [(0, 0)]
    assert at_the_end(saves, 4) == []
