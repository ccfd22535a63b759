"""The built-in pair on a store that works: what was computed once is loaded, to the token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from bench_engine import DIGEST, LAYOUT, BenchEngine, PlainKv, T, llm_args, reference, sound_blocks
from stores import DictStore

from kvconnect import frame
from kvconnect.backend import Child
from kvconnect.keys import chain_key, store_key

PROMPT = list(range(1, 10 * T + 3))  # ten blocks and two tokens
GENERATE = 3
ANSWER = reference(PROMPT, GENERATE)
SLOT = frame.frame_nbytes(LAYOUT.block_nbytes)


def run(store: object, prompt: list[int] = PROMPT, max_tokens: int = GENERATE, **settings):
    """One engine's life: the answer, and how many prompt tokens came from the store."""
    with BenchEngine(llm_args(store, **settings)) as bench:
        answer = bench.answer(prompt, max_tokens)
        request_id = next(iter(bench.requests))
        assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)
        assert not bench.manager.has_pending()
        return answer, bench.store_tokens[request_id]


@pytest.mark.parametrize("length", [1, 2, T - 1, T, T + 1, 2 * T - 1, 2 * T, 2 * T + 1, 5 * T])
def test_every_length_hits_all_but_its_last_token(store: DictStore, length: int) -> None:
    """Also where generated tokens completed the prompt's last block in the first life."""
    prompt = PROMPT[:length]
    for max_tokens in (1, T + 1):
        expected = reference(prompt, max_tokens)
        assert run(store, prompt, max_tokens)[0] == expected
        assert run(store, prompt, max_tokens) == (expected, length - 1)


def test_without_children_whole_blocks_are_found() -> None:
    store = DictStore(enumerable=False)
    run(store)
    assert run(store) == (ANSWER, 10 * T)
    assert all(len(block.tokens) == T for block in store.blocks)


def test_no_tails_are_stored_if_not_wanted() -> None:
    store = DictStore()
    run(store, save_partial_tails=False)
    assert {len(block.tokens) for block in store.blocks} == {T}


def test_what_a_tail_does_not_fill_is_cleared(store: DictStore) -> None:
    """Or a store would keep KV of whoever had the block before."""
    kv = PlainKv()
    kv.pool.fill_(3.5)
    with BenchEngine(llm_args(store), kv=kv) as bench:
        bench.answer(PROMPT[: T + 1], 1)
    tail = store.blocks[-1]
    assert len(tail.tokens) == 1
    stored = frame.payload(store.frames[tail.key], LAYOUT.block_nbytes).clone().view(LAYOUT.dtype)
    planes = stored.view(LAYOUT.num_layers * 2, T)
    assert (planes[:, :1] != 3.5).all()
    assert (planes[:, 1:] == 0).all()


def test_salts_do_not_share(store: DictStore) -> None:
    with BenchEngine(llm_args(store)) as bench:
        for salt in (None, "a", "b"):
            bench.answer(PROMPT, 1, salt)
        assert sum(bench.store_tokens.values()) == 0


def test_blocks_on_the_device_that_the_store_lacks_are_offered(store: DictStore) -> None:
    """As after a drop: another request that uses them brings them to the store."""
    kv, sound = PlainKv(), sound_blocks(PROMPT)
    with BenchEngine(llm_args(store), kv=kv) as bench:
        bench.answer(PROMPT, 1)
        bench.manager._worker._queue.flush(60)
        store.frames.clear()
        store.blocks.clear()
        kv.device_match = lambda _: 6 * T
        kv.fill = lambda _: kv.pool[: len(sound)].copy_(sound)
        bench.answer(PROMPT, 1)
    assert run(store, PROMPT, 1) == (ANSWER[:1], len(PROMPT) - 1)


def test_a_load_that_is_not_worth_it_is_not_made(store: DictStore) -> None:
    run(store)
    assert run(store, min_load_tokens=len(PROMPT) - 1)[1] == len(PROMPT) - 1
    assert run(store, min_load_tokens=len(PROMPT)) == (ANSWER, 0)


def test_what_a_preempted_request_has_published_is_revoked() -> None:
    with BenchEngine(llm_args(DictStore())) as bench:
        worker, revoked = bench.manager._worker, []
        worker._publisher = SimpleNamespace(revoke=revoked.append)
        worker.request_reset(7, 0)
        worker._publisher = None
        assert revoked == [7]


def test_what_is_held_of_a_preempted_request_is_saved_before_its_blocks_are_reused(
    store: DictStore,
) -> None:
    with BenchEngine(llm_args(store, save_on="finish")) as bench:
        request = bench.submit(PROMPT, 5)
        bench.step()
        assert len(bench.manager._worker._held) == 1
        bench.preempt(request)
        assert len(bench.manager._worker._held) == 0
        bench.run()


def test_save_on_finish_saves_nothing_before_the_end(store: DictStore) -> None:
    with BenchEngine(llm_args(store, save_on="finish")) as bench:
        bench.submit(PROMPT, GENERATE)
        bench.step()
        bench.manager._worker._queue.flush(60)
        assert store.saves == []
        bench.run()
    assert run(store) == (ANSWER, len(PROMPT) - 1)


@pytest.mark.parametrize(("priority", "stored"), [(35, True), (36, False)])
def test_blocks_below_the_priority_are_not_saved(
    store: DictStore, priority: int, *, stored: bool
) -> None:
    run(store, min_priority=priority)
    assert bool(store.frames) is stored


def test_what_follows_a_block_that_is_not_saved_is_not_saved(store: DictStore) -> None:
    class Ranked(PlainKv):
        def get_priorities(self, request, start=0):
            return [80, 80, 5, 80, 80, 80, 80, 80, 80, 80, 80, 80][start:]

    with BenchEngine(llm_args(store, min_priority=30), kv=Ranked()) as bench:
        bench.answer(PROMPT, 1)
    assert len(store.frames) == 2


def test_children_that_do_not_follow_from_their_tokens_are_not_believed(store: DictStore) -> None:
    run(store, [*PROMPT[: T + 2], 98, 97], 1)  # shares half of the second block
    own = np.array(PROMPT[T : 2 * T], np.int32)
    store.foster_children = [Child(store_key(chain_key(DIGEST, own)), own)]  # would share all of it
    wanted = PROMPT[: 2 * T + 1]
    assert run(store, wanted, 1) == (reference(wanted, 1), T + 2)


def test_sixteen_at_once_are_all_right(store: DictStore) -> None:
    prompts = [PROMPT[: T * (1 + n % 5) + n % 3] + [100 + n] * 5 for n in range(16)]
    for _ in range(2):
        with BenchEngine(llm_args(store), kv=PlainKv(256)) as bench:
            requests = [bench.submit(prompt, 4) for prompt in prompts]
            bench.run()
            for prompt, request in zip(prompts, requests, strict=True):
                assert request.tokens.view[len(prompt) :].tolist() == reference(prompt, 4)
    assert sum(bench.store_tokens.values()) == sum(len(prompt) - 1 for prompt in prompts)
