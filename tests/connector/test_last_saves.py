"""The last blocks of a request are saved before they go, in whichever step it ends."""

from __future__ import annotations

import random

import pytest
from bench_engine import LAYOUT, BenchEngine, PlainKv, T, llm_args
from ranks import Pair
from stores import DictStore

from kvconnect import frame
from kvconnect.keys import BlockKey, Shard, store_key
from kvconnect.request import LlmRequest

SAVE_ON = pytest.mark.parametrize("save_on", ["full", "finish"])


def payloads(store: DictStore) -> dict[BlockKey, bytes]:
    """Returns what `store` has, by key."""
    return {
        key: frame.payload(one, LAYOUT.block_nbytes).numpy().tobytes()
        for key, one in store.frames.items()
    }


def saved_alone(requests: list[LlmRequest]) -> dict[BlockKey, bytes]:
    """Returns what an engine saves that runs `requests` to their ends, one after the other."""
    store = DictStore()
    with BenchEngine(llm_args(store, lookup_timeout_ms=5000.0)) as bench:
        for request in requests:
            prompt = request.tokens.view[: request.prompt_len].tolist()
            bench.answer(prompt, request.num_generated_tokens)
    return payloads(store)


def held_keys(request: LlmRequest) -> list[BlockKey]:
    """Returns the keys of the blocks that hold the valid tokens of `request`."""
    valid = request.num_computed_tokens
    keys = list(request.block_keys(0, valid // T))
    return [*keys, request.key_chain.tail(valid)] if valid % T else keys


@SAVE_ON
def test_requests_that_end_in_steps_in_a_row(save_on: str) -> None:
    store = DictStore()
    with BenchEngine(llm_args(store, save_on=save_on, lookup_timeout_ms=5000.0)) as bench:
        requests = [bench.submit([number, *range(1, 2 * T)], 1 + number) for number in range(9)]
        bench.run()
        bench.manager._worker._queue.flush(5)
        assert payloads(store) == saved_alone(requests)


@SAVE_ON
def test_requests_of_two_ranks_that_end_in_steps_in_a_row(save_on: str) -> None:
    with Pair([DictStore(), DictStore()], save_on=save_on) as pair:
        ids = [pair.submit([number, *range(1, 2 * T)], 1 + number) for number in range(6)]
        pair.run()
        pair.flush()
        for rank, store in enumerate(pair.stores):
            saved = {block.key for block in store.blocks}
            for request in map(pair.leader.requests.get, ids):
                assert {store_key(key, 0, Shard(rank, 2)) for key in held_keys(request)} <= saved


@SAVE_ON
def test_hundreds_of_short_requests_in_a_pool_that_is_handed_on_at_once(save_on: str) -> None:
    """Some are preempted, some aborted; blocks are written over when they are free."""
    chosen = random.Random(7)
    store, kv = DictStore(), PlainKv(32)
    aborted: set[LlmRequest] = set()
    with BenchEngine(
        llm_args(store, save_on=save_on, lookup_timeout_ms=5000.0), kv=kv, chunk=2 * T
    ) as bench:
        for number in range(200):
            prompt = [number // 50, number % 50, *range(chosen.randrange(2 * T))]
            bench.submit(prompt, chosen.randrange(1, 2 * T))
            while len(kv.blocks) + len(bench.queue) > 4:
                bench.step()
                kv.pool[kv.free_ids()] = float("nan")
            if bench.running and number % 7 == 0:
                bench.preempt(chosen.choice(bench.running))
            if bench.running and number % 11 == 0:
                aborted.add(one := chosen.choice(bench.running))
                bench.abort(one)
        bench.run()
        bench.manager._worker._queue.flush(5)
        assert kv.get_num_free_blocks() == len(kv.pool)
        expected = saved_alone([one for one in bench.requests.values() if one not in aborted])
        saved = payloads(store)
        assert {key: saved.get(key) for key in expected} == expected
