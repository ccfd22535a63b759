"""The built-in pair on two ranks, which share nothing but what they exchange."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Self

import pytest
from bench_engine import LAYOUT, BenchEngine, T, llm_args, reference
from ranks import Meeting, Rank
from stores import DictStore

from kvconnect import frame
from kvconnect.keys import Shard, store_key
from kvconnect.request import ExternalMatch, LlmRequest

PROMPT = list(range(1, 4 * T + 2))  # four blocks and a token
SLOT = frame.frame_nbytes(LAYOUT.block_nbytes)
BOTH = pytest.mark.parametrize("save_on", ["full", "finish"])


class Relay:
    """Hands what the leader's connector matched to the follower, as its scheduler would."""

    def __init__(self, bench: BenchEngine, queue: SimpleQueue[ExternalMatch]) -> None:
        self._manager, self._queue = bench.manager, queue
        self._leads = bench.manager._scheduler is not None
        bench.kv.set_external_matcher(self)

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        if not self._leads:
            return self._queue.get(timeout=10)
        match = self._manager.match_external(request, num_device_tokens)
        self._queue.put(match)
        return match

    def blocks_allocated(self, request: LlmRequest, block_ids: list[int]) -> None:
        self._manager.blocks_allocated(request, block_ids)


class Pair:
    """Two ranks with a store each. What is called here happens on both at once."""

    def __init__(self, stores: list[DictStore], *settings: dict[str, Any], **common: Any) -> None:
        self.stores = stores
        self._threads = ThreadPoolExecutor(2)
        meeting, matches = Meeting(2), SimpleQueue[ExternalMatch]()
        self.benches: list[BenchEngine] = []
        common = {"lookup_timeout_ms": 5000.0} | common
        for rank, own in enumerate(settings or ({}, {})):
            args = llm_args(stores[rank], shard=Shard(rank, 2), **(common | own))
            bench = BenchEngine(args, communicator=Rank(meeting, rank))
            bench._ids = itertools.count()
            Relay(bench, matches)
            self.benches.append(bench)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self.stores:
            store.open_doors()
        self.both(lambda bench: bench.manager.end_step())  # what just ended is known to the workers
        self.both(lambda bench: bench.manager.shutdown())
        self._threads.shutdown()

    @property
    def leader(self) -> BenchEngine:
        return self.benches[0]

    def both(self, do: Callable[[BenchEngine], Any]) -> list[Any]:
        return [one.result(20) for one in [self._threads.submit(do, b) for b in self.benches]]

    def submit(self, prompt: list[int] = PROMPT, max_tokens: int = 1) -> int:
        """The id of a request that both ranks have."""
        leaders, _ = [bench.submit(prompt, max_tokens) for bench in self.benches]
        return leaders.request_id

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.both(BenchEngine.step)

    def preempt(self, request_id: int) -> None:
        self.both(lambda bench: bench.preempt(bench.requests[request_id]))

    def run(self) -> None:
        deadline = time.monotonic() + 15
        while any(one.queue or one.running or one.loading or one.saving for one in self.benches):
            assert time.monotonic() < deadline, "the ranks hang"
            self.step()
            time.sleep(0.001)

    def flush(self) -> None:
        """Until what is staged is written or lost."""
        assert all(self.both(lambda bench: bench.manager._worker._queue.flush(5)))

    def saved(self, request_id: int, *, tail: bool = False) -> list[int]:
        """How many leading blocks of the request the store of each rank has."""
        request = self.leader.requests[request_id]
        keys = request.block_keys()
        if tail:
            keys = [*keys, request.key_chain.tail(request.num_computed_tokens)]
        return [
            next((n for n, key in enumerate(keys) if store_key(key, 0, Shard(rank, 2)) not in has),
                 len(keys))
            for rank, has in enumerate(store.frames for store in self.stores)
        ]  # fmt: skip

    def answer(self, request_id: int) -> list[list[int]]:
        requests = [bench.requests[request_id] for bench in self.benches]
        return [one.tokens.view[one.prompt_len :].tolist() for one in requests]

    def nothing_is_left(self) -> None:
        assert not self.leader.manager._scheduler._states
        for bench in self.benches:
            worker = bench.manager._worker
            assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)
            assert not worker._leaving
            assert not worker._held


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
        assert [bench.store_tokens[again] for bench in pair.benches] == [4 * T, 4 * T]


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
        for bench in pair.benches:
            bench.kv.pool.fill_(9.0)  # handed on at once
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
        pair.both(lambda bench: bench.abort(bench.requests[request]))
        pair.run()
        pair.flush()
        assert pair.saved(request) == [4, 4]
        pair.nothing_is_left()
