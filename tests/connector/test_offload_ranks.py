"""The built-in pair on two ranks, which share nothing but what they exchange."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bench_engine import LAYOUT, T, reference
from ranks import PROMPT, Pair
from stores import DictStore

from kvconnect import frame
from kvconnect.request import RequestState

SLOT = frame.frame_nbytes(LAYOUT.block_nbytes)
BOTH = pytest.mark.parametrize("save_on", ["full", "finish"])


@pytest.fixture(params=[False, True], ids=["own", "shared"])
def stores(request: pytest.FixtureRequest) -> Iterator[list[DictStore]]:
    """One for each rank: apart, or with the same frames."""
    stores = [DictStore(enumerable=False), DictStore(enumerable=False)]
    if request.param:
        stores[1].frames = stores[0].frames
    yield stores
    for store in stores:
        store.open_doors()


@BOTH
def test_every_rank_saves_every_block_and_loads_it_again(
    stores: list[DictStore], save_on: str
) -> None:
    with Pair(stores, save_on=save_on) as pair:
        first = pair.submit()
        pair.run()
        pair.flush()
        assert pair.saved(first) == [4, 4]
        pair.nothing_is_left()
        again = pair.submit(max_tokens=3)
        pair.run()
        assert pair.answer(again) == [reference(PROMPT, 3)] * 2
        assert pair.leader.store_tokens[again] == 4 * T


@BOTH
def test_every_rank_saves_the_tail(save_on: str) -> None:
    stores = [DictStore(), DictStore()]
    with Pair(stores, save_on=save_on) as pair:
        request = pair.submit([*PROMPT, 7])
        pair.run()
        pair.flush()
        assert pair.saved(request, tail=True) == [5, 5]


@BOTH
def test_what_ended_just_before_the_end_is_saved(stores: list[DictStore], save_on: str) -> None:
    with Pair(stores, save_on=save_on) as pair:
        request = pair.submit()
        pair.step()
    assert pair.saved(request) == [4, 4]


@BOTH
def test_every_rank_saves_a_preempted_request_before_its_blocks_go(
    stores: list[DictStore], save_on: str
) -> None:
    with Pair(stores, save_on=save_on) as pair:
        request = pair.submit(max_tokens=3)
        pair.step()
        pair.preempt(request)
        pair.idle_step()
        pair.flush()
        assert pair.saved(request) == [4, 4]
        pair.run()
        assert pair.answer(request) == [reference(PROMPT, 3)] * 2
    with Pair(stores) as pair:
        request = pair.submit()
        pair.run()
        assert pair.answer(request) == [reference(PROMPT)] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_drop_on_any_rank_ends_the_saves_until_the_end(
    stores: list[DictStore], rank: int
) -> None:
    stores[rank].at_save.shut()
    settings: list[dict[str, Any]] = [{}, {}]
    settings[rank] = {"staging_bytes": 4 * SLOT}
    with Pair(stores, *settings) as pair:
        request = pair.submit(max_tokens=6 * T)
        pair.step()  # three of four blocks have room
        stores[rank].at_save.open()
        pair.step(4 * T)
        pair.flush()
        expected = [4, 4]
        expected[rank] = 3
        assert pair.saved(request) == expected
        pair.run()
        pair.flush()
        assert pair.saved(request) == [10, 10]
        pair.nothing_is_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_any_rank_is_made_up_for_at_the_end(
    stores: list[DictStore], rank: int
) -> None:
    stores[rank].save_error = OSError(28, "no space left on device")
    with Pair(stores) as pair:
        request = pair.submit(max_tokens=6 * T)
        pair.step()
        pair.flush()
        stores[rank].save_error = None
        pair.step(4 * T)
        pair.flush()
        expected = [4, 4]
        expected[rank] = 0
        assert pair.saved(request) == expected
        pair.run()
        pair.flush()
        assert pair.saved(request) == [10, 10]


@BOTH
@pytest.mark.parametrize("rank", [0, 1])
def test_behind_a_backlog_of_any_rank_no_blocks_are_kept(rank: int, save_on: str) -> None:
    stores = [DictStore(enumerable=False), DictStore(enumerable=False)]
    stores[rank].at_save.shut()
    settings: list[dict[str, Any]] = [{}, {}]
    settings[rank] = {"staging_bytes": 4 * SLOT}
    with Pair(stores, *settings, save_on=save_on) as pair:
        first = pair.submit()
        pair.step(2)
        assert first in pair.leader.saving
        other = pair.submit([9, *PROMPT])
        pair.step()
        assert other not in pair.leader.saving
        stores[rank].at_save.open()
        pair.run()
        pair.step()
        pair.flush()
        assert pair.saved(first) == [4, 4]
        pair.nothing_is_left()


@BOTH
def test_an_aborted_request_leaves_nothing_behind(stores: list[DictStore], save_on: str) -> None:
    with Pair(stores, save_on=save_on) as pair:
        request = pair.submit(max_tokens=9)
        pair.step(2)
        pair.abort(request)
        pair.run()
        pair.flush()
        assert pair.saved(request) == [4, 4]
        pair.nothing_is_left()


def test_the_leader_asks_again_for_what_ends_on_another_rank() -> None:
    """Its own worker has nothing left to wake it for."""
    stores = [DictStore(enumerable=False), DictStore(enumerable=False)]
    with Pair(stores) as pair:
        pair.submit()
        pair.run()
        pair.flush()
        stores[1].at_load.shut()
        pair.submit(max_tokens=3)
        pair.step(2)
        assert pair.leader.loading
        waits = pair.leader.manager.wait_seconds()
        assert waits is not None
        assert waits <= 0.01
        stores[1].open_doors()
        pair.run()


@BOTH
@pytest.mark.parametrize("ends", ["preempted", "finished"])
def test_what_was_ordered_before_a_rewind_is_not_saved_with_what_came_after(
    save_on: str, ends: str
) -> None:
    stores = [DictStore(enumerable=False), DictStore(enumerable=False)]
    with Pair(stores, save_on=save_on) as pair:
        request = pair.submit(max_tokens=6)
        pair.step()

        # To the middle of the third block, from where it goes on with other tokens.
        one = pair.leader.requests[request]
        one.rewind(2 * T + 1)
        pair.leader.kv.rewind(one, 0)
        pair.leader.manager.on_rewind(one)
        one.append_tokens(np.arange(50, 49 + T, dtype=np.int32))
        one.num_computed_tokens = 2 * T + 1
        one.state = RequestState.CONTEXT
        pair.step()
        if ends == "preempted":
            pair.preempt(request)
        pair.run()
        pair.flush()
        for prompt in (PROMPT, pair.leader.requests[request].tokens.view.tolist()):
            again = pair.submit(prompt, max_tokens=3)
            pair.run()
            assert pair.answer(again) == [reference(prompt, 3)] * 2
        pair.flush()
        assert pair.saved(again) == [6, 6]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_computed_where_the_other_has_not_come_as_far(
    stores: list[DictStore], rank: int
) -> None:
    with Pair(stores) as pair:
        pair.submit()
        pair.run()
        pair.flush()
        stores[rank].tamper = lambda key, buffer: (
            buffer.zero_() if key == pair.store_keys(rank)[2] else None
        )
        stores[1 - rank].at_load.shut()
        for pool in pair.pools:
            pool.fill_(9.0)
        again = pair.submit(max_tokens=3)
        deadline = time.monotonic() + 60
        while again in pair.leader.loading or pair.leader.queue:
            assert time.monotonic() < deadline
            pair.step()
        pair.step(3)
        stores[1 - rank].open_doors()
        pair.run()
        assert pair.answer(again) == [reference(PROMPT, 3)] * 2
