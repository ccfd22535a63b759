"""Who is called, when and how often: the table of the connector API, through the real engine."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import recording
from bench_engine import BenchEngine, llm_args
from recording import Script

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.request import LlmRequest, RequestState

T = 32
LAYERS = 3


@pytest.fixture(scope="module")
def model(model_of: Callable[[str], Path]) -> Path:
    return model_of("llama")


@pytest.fixture
def llm(model: Path, script: Script) -> Iterator[LLM]:
    with engine(model) as llm:
        yield llm


def engine(model: Path, **settings) -> LLM:
    cache = KvCacheConfig(tokens_per_block=T, max_tokens=64 * T)
    return LLM(model, kv_cache=cache, connector=recording.config(), **settings)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 250, length)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_simple(llm: LLM, script: Script) -> None:
    llm.generate([prompt(T - 8)], params(8))
    assert len(script.named("register_kv_caches")) == 1
    assert script.named("register_kv_caches")[0][0][1] == LAYERS
    assert len(script.named("get_num_new_matched_tokens")) == 1
    [(request_id, block_ids)] = script.named("update_state_after_alloc")
    assert len(block_ids) == 1
    for name in ("build_connector_meta", "start_load_kv", "wait_for_save", "get_finished"):
        assert len(script.named(name)) == 8, name
    in_order = [(layer,) for _ in range(8) for layer in range(LAYERS)]
    assert script.named("wait_for_layer_load") == in_order
    assert script.named("save_kv_layer") == in_order
    assert script.named("request_finished") == [(request_id, block_ids)]
    first, *later = script.outputs
    assert (len(first.new_requests), len(first.cached_requests)) == (1, 0)
    for output in later:
        assert not output.new_requests
        [cached] = output.cached_requests
        assert len(cached.new_tokens) == 1


def test_the_order_of_calls_in_a_step(llm: LLM, script: Script) -> None:
    llm.generate([prompt(T)], params(1))
    layers = ["wait_for_layer_load", "save_kv_layer"] * LAYERS
    assert script.names()[1:] == [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "bind_connector_meta",
        "start_load_kv",
        *layers,
        "wait_for_save",
        "request_finished",
        "get_finished",
    ]


def test_metadata_is_bound_during_the_step_and_cleared_after_wait_for_save(
    llm: LLM, script: Script
) -> None:
    steps = iter(range(100))
    script.meta = lambda _: next(steps)
    llm.generate([prompt(T)], params(3))
    assert script.named("start_load_kv") == [(0,), (1,), (2,)]
    assert script.named("wait_for_save") == [(0,), (1,), (2,)]
    assert script.worker.get_connector_meta() is None


def test_async_load(llm: LLM, script: Script) -> None:
    script.match = lambda *_: (16, True)
    llm.generate([prompt(T)], params(8))
    calls = script.named("get_finished")
    assert len(calls) == 9
    [(request_id, _)] = script.named("update_state_after_alloc")
    assert calls[0] == ([], [request_id])
    assert calls[1:] == [([], [])] * 8
    loading, computing = script.outputs[:2]
    assert [one.request_id for one in loading.loading_requests] == [request_id]
    assert loading.loading_requests[0].computed_position == 0
    assert not loading.new_requests
    # It computes only now that it was reported loaded, and the external tokens count.
    assert computing.new_requests[0].computed_position == 16
    assert computing.new_requests[0].num_scheduled_tokens == 16


def test_async_load_computes_only_once_it_was_reported(llm: LLM, script: Script) -> None:
    script.match = lambda *_: (16, True)
    asked: list[list[int]] = []

    def finished(saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        asked.append(loading)
        done = asked[0] if len(asked) == 3 else []
        assert script.named("wait_for_layer_load") == [] or len(asked) > 3
        return saving, done

    script.finished = finished
    llm.generate([prompt(T)], params(1))
    assert len(asked) == 4


def test_async_save_as_tensorrt_llm_tests_it(llm: LLM, script: Script) -> None:
    """Eight calls of get_finished in eight steps, and the request's id in the eighth."""
    script.keep = lambda _: True
    llm.generate([prompt(T - 8)], params(8))
    llm.close()
    [(request_id, block_ids)] = script.named("request_finished")
    assert len(block_ids) == 1
    assert script.named("get_finished") == [([], [])] * 7 + [([request_id], [])]
    assert llm.stats().free_blocks == llm.stats().max_blocks


def test_an_id_is_passed_in_by_the_step_that_ends_its_request_whatever_loads_meanwhile(
    llm: LLM, script: Script
) -> None:
    answers = itertools.cycle([(0, False), (16, True), (16, False)])
    script.match, script.keep = (lambda *_: next(answers)), lambda _: True
    lengths = [1, 2, 2, 3, 4, 5, 6, 6, 7]
    llm.generate(
        [prompt(T + number, seed=number) for number in range(len(lengths))],
        [params(length) for length in lengths],
    )
    llm.close()
    ended: list[int] = []
    for name, *args in script.calls:
        if name == "request_finished":
            ended.append(args[0])
        elif name == "get_finished":
            assert args[0] == ended
            ended.clear()
        else:
            assert not ended, f"{name} came before get_finished"
    assert len(script.named("request_finished")) == len(lengths)
    assert llm.stats().free_blocks == llm.stats().max_blocks


def test_async_save(llm: LLM, script: Script) -> None:
    script.keep = lambda _: True
    pool = llm.stats().max_blocks
    free: list[int] = []
    released = threading.Event()

    def finished(saving: list[int], loading: list[int]) -> tuple[list[int], list[int]]:
        ended = [request_id for request_id, _ in script.named("request_finished")]
        if not ended:
            return [], []
        free.append(llm.stats().free_blocks)
        if len(free) < 3:
            return [], []
        released.set()
        return (ended if len(free) == 3 else []), []

    script.finished = finished
    llm.generate([prompt(T - 8)], params(8))
    request_id = script.named("request_finished")[0][0]
    assert released.wait(60)
    llm.close()
    # Passed in once; the blocks stayed while the worker said nothing.
    assert script.named("get_finished").count(([request_id], [])) == 1
    assert free[:3] == [pool - 1] * 3
    assert llm.stats().free_blocks == pool


def test_an_idle_engine_gives_the_blocks_back(model: Path) -> None:
    """No other request comes, with whose steps the last blocks would be saved."""
    cache = KvCacheConfig(tokens_per_block=T, max_tokens=64 * T)
    with LLM(model, kv_cache=cache, connector="memory:?capacity=8MiB") as llm:
        for length in (1, 3, T):
            llm.generate(prompt(T - 8), params(length))
            until = time.monotonic() + 10
            while (stats := llm.stats()).free_blocks < stats.max_blocks:
                assert time.monotonic() < until, stats
                time.sleep(0.01)


def test_scheduler_output(llm: LLM, script: Script) -> None:
    llm.generate([prompt(48)], params(32))
    [(_, block_ids)] = script.named("update_state_after_alloc")
    assert len(block_ids) == 2
    [first] = script.outputs[0].new_requests
    assert len(first.new_tokens) == 48
    assert len(first.new_block_ids) == 2
    assert (first.computed_position, first.num_scheduled_tokens) == (0, 48)
    assert len(first.block_keys) == 1
    assert first.new_block_ids_by_group == (first.new_block_ids,)
    assert len(first.priorities) == 2
    assert len(script.outputs) == 32
    for number, output in enumerate(script.outputs[1:]):
        [cached] = output.cached_requests
        assert cached.computed_position == 48 + number
        assert cached.num_scheduled_tokens == 1
        assert len(cached.new_tokens) == 1
        assert len(cached.new_block_ids) == (cached.computed_position % T == 0)
    assert len(script.named("request_finished")[0][1]) == 3


def test_partial_offer(llm: LLM, script: Script) -> None:
    llm.generate([prompt(T)], params(2))
    script.match = lambda *_: (8, False)
    llm.generate([prompt(T, seed=1)], params(2))
    second = script.outputs[2].new_requests[0]
    assert second.computed_position == 0
    assert second.num_scheduled_tokens == T - 8


def test_chunked_prefill(model: Path, script: Script) -> None:
    with engine(model, max_num_tokens=128) as llm:
        llm.generate([prompt(256)], params(32))
    [(_, block_ids)] = script.named("update_state_after_alloc")
    assert len(block_ids) == 8
    [first] = script.outputs[0].new_requests
    assert (len(first.new_tokens), len(first.new_block_ids)) == (256, 8)
    assert (first.computed_position, first.num_scheduled_tokens) == (0, 128)
    [second] = script.outputs[1].cached_requests
    assert (second.new_tokens, second.new_block_ids) == ([], [])
    assert (second.computed_position, second.num_scheduled_tokens) == (128, 128)
    assert len(script.named("request_finished")[0][1]) == 9


def test_mixed_batch(llm: LLM, script: Script) -> None:
    answers = [(16, True), (32, False)]
    order: list[int] = []

    def match(request: LlmRequest, _position: int) -> tuple[int, bool]:
        order.append(request.request_id)
        return answers[len(order) - 1]

    def finished(saving: list[int], _loading: list[int]) -> tuple[list[int], list[int]]:
        """Request 0 is loaded once request 1 has run."""
        ran = [one.request_id for output in script.outputs for one in output.new_requests]
        return saving, order[:1] if len(order) == 2 and ran == order[1:] else []

    script.match, script.finished = match, finished
    llm.generate([prompt(64), prompt(64, seed=1)], params(1))
    loading = [one.request_id for output in script.outputs for one in output.loading_requests]
    running = [one for output in script.outputs for one in output.new_requests]
    assert loading == order[:1]
    assert [one.request_id for one in running] == [order[1], order[0]]
    assert [one.num_scheduled_tokens for one in running] == [32, 48]


def test_drafts(script: Script) -> None:
    """The engine makes no drafts; a manager's batch may have them all the same."""
    with BenchEngine(llm_args(recording.config())) as bench:
        request = bench.submit([1, 2, 3, 4, 5], max_tokens=2)
        bench.step()
        assert request.state is RequestState.GENERATION
        request.draft_tokens = np.array([7, 8, 9], np.int32)
        bench.manager.begin_step(bench.schedule())
    [cached] = script.outputs[1].cached_requests
    assert cached.num_scheduled_tokens == 4
    assert cached.computed_position == 5
    assert len(cached.new_tokens) == 1


def test_rejected_drafts_are_reported_again_once_they_are_real(script: Script) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        request = bench.submit([1, 2, 3, 4, 5, 6], max_tokens=9)
        bench.step()
        request.draft_tokens = np.array([7, 8, 9], np.int32)  # positions 7, 8 and 9: a third block
        bench.step()
        request.draft_tokens = np.empty(0, np.int32)
        held = len(bench.kv.blocks[request.request_id])
        del bench.kv.blocks[request.request_id][2:]
        bench.manager.on_rewind(request)
        assert script.named("on_rewind") == [
            (request.request_id, bench.kv.blocks[request.request_id])
        ]
        assert held == 3
        bench.step()
        [cached] = script.outputs[2].cached_requests
        assert cached.new_block_ids == []  # 8 tokens still fit two blocks of 4
        bench.step()
        [cached] = script.outputs[3].cached_requests
        assert len(cached.new_block_ids) == 1


def test_a_preempted_request_is_admitted_and_reported_anew(script: Script) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        request = bench.submit([1, 2, 3, 4, 5], max_tokens=4)
        bench.step()
        bench.step()
        bench.preempt(request)
        bench.step()
    assert script.named("request_reset") == [(request.request_id,)]
    assert len(script.named("get_num_new_matched_tokens")) == 2
    [again] = script.outputs[2].new_requests
    assert len(again.new_tokens) == 7
    assert len(again.new_block_ids) == 2


def test_an_idle_step_asks_only_what_ended(script: Script) -> None:
    with BenchEngine(llm_args(recording.config())) as bench:
        script.calls.clear()
        bench.manager.end_step()
        assert script.names() == ["get_finished"]
