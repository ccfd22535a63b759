"""Loads beside computing that fail, hang or end early: nothing is wrong, lost or left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from beside import (
    GREEDY,
    PROMPT,
    Late,
    T,
    crowd,
    loads,
    nothing,
    send_back_once,
    slow,
    stop_at,
    until,
    whole_blocks,
    worker,
)
from observed import check_idle, watch_batches, words

from kvconnect import SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.frame import HEADER_NBYTES
from kvconnect.request import LlmRequest, RequestState

FAULTS = ["lost", "broken", "failing"]
"""Of a block that a lookup found."""


def models(*names: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", names, indirect=True)


def release_after_loads(late: Late) -> None:
    """Answers all held calls after the first token of a request, whose load has ended."""
    engine, store = late.llm._engine, late.store
    step = engine.step

    def step_and_release() -> bool:
        worked = step()
        running = engine._scheduler.running
        if store.held and any(one.num_tokens > one.prompt_len for one in running):
            until(lambda: not loads(late.llm)._running)
            store.release()
            until(lambda: not loads(late.llm)._reads)
        return worked

    engine.step = step_and_release


# ---------------------------------------------------------------------- blocks that are missing


def some_faults(late: Late, turn: int) -> Iterator[tuple[int, str]]:
    """Numbers of blocks, each with a fault; several pools have fewer in the short form."""
    step = 4 if turn == 0 and len(late.llm.layouts) > 1 else 1
    for number in range(len(late.keys) - 1, -1, -step):
        yield number, FAULTS[(number + turn) % 3]


@pytest.mark.parametrize("turn", [0, *slow(1, 2)])
def test_what_is_behind_a_missing_block_is_used(turn, late):
    """What lies before it is computed, and saved anew. A load ignores blocks that it needs not."""
    llm, store = late.open(), late.store
    store.writable = True
    late.beside.decide = nothing
    for number, fault in some_faults(late, turn):
        for key in late.saved.keys_at(PROMPT)[number]:
            store.become(late.saved)
            frame = store.frames[key].clone()
            setattr(store, fault, {key})
            layout = llm.layouts[store.blocks[key][0]]
            is_needed = late.needs(layout, number, late.end)
            late.ask(reused=late.end - (late.met(number + 1) if is_needed else 0))
            if fault == "lost" and is_needed and number < 12 and not layout.states:
                until(lambda key=key: key in store.frames)
                got, wanted = (
                    one[HEADER_NBYTES:].view(torch.float64) for one in (store.frames[key], frame)
                )
                assert torch.allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize("turn", [0, *slow(1, 2)])
def test_a_missing_block_is_found_while_it_computes(turn, late):
    late.open()
    for number, fault in some_faults(late, turn):
        for key in late.keys[number]:
            late.store.become(late.saved)
            setattr(late.store, fault, {key})
            late.ask()
    assert late.beside.asked > 0


@models("mixed", *slow("gpt_oss"))
def test_blocks_that_no_load_needs_are_saved_anew_with_a_missing_one(late):
    late.open()
    late.store.writable = True
    late.beside.decide = nothing
    for number in (1, 7):
        late.store.become(late.saved)
        keys = late.keys[number]
        late.store.lost = {key for key in keys if late.store.blocks[key][0] == 0}
        for key in keys - late.store.lost:
            del late.store.frames[key]
        late.ask()
        until(lambda keys=keys: keys <= late.store.frames.keys())


@pytest.mark.parametrize("number", [0, 3])
@models("llama")
def test_a_missing_block_that_is_computed_meanwhile_is_saved_anew(number, late):
    """All others that the load still needs have come."""
    llm, store, keys = late.open(), late.store, late.keys
    store.writable = True
    store.lost, store.held = keys[number], keys[11]

    def decide(request: LlmRequest, budget: int) -> int:
        load = loads(llm)._overlapping.get(request.request_id)
        if load is None:
            return 0
        until(lambda: load.stop < len(load.order.blocks))
        if request.num_computed_tokens > number * T:
            store.release()
            until(lambda: load.ended)
            return 0
        return min(whole_blocks(request, budget), T)

    late.beside.decide = decide
    late.ask(reused=late.end - (number + 1) * T)
    until(lambda: keys[number] <= store.frames.keys())


@pytest.mark.parametrize(("fault", "number"), [("lost", 0), ("lost", 3), ("broken", 3)])
@models("llama")
def test_a_missing_block_that_is_noticed_after_the_load_is_saved_anew(fault, number, late):
    """The answer for it comes once all tokens before what has come are computed."""
    llm, store = late.open(), late.store
    (key,) = late.keys[number]
    frame = store.frames[key].clone()
    store.writable = True
    setattr(store, fault, {key})
    store.held = {key}
    late.beside.decide = late.beside.after(llm, (number + 1) * T)
    release_after_loads(late)
    late.check(llm.generate(PROMPT, GREEDY)[0], reused=late.end - (number + 1) * T)
    assert not store.held
    late.check_rest()
    until(lambda: torch.equal(store.frames.get(key, frame[:0]), frame))


@pytest.mark.parametrize("noticed", ["before", "after"])
@models("llama")
def test_a_missing_block_of_a_load_that_is_overtaken_is_saved_anew(noticed, late):
    """Nothing of the load comes, since its first block hangs."""
    llm, store = late.open(), late.store
    (key,) = late.keys[9]
    frame = store.frames[key].clone()
    store.writable = True
    store.lost, store.held = {key}, {key, *late.keys[12]}

    def decide(request: LlmRequest, budget: int) -> int:
        load = loads(llm)._overlapping[request.request_id]
        until(lambda: load.next > 3)
        if noticed == "before":
            store.release({key})
            until(lambda: load.stop < len(load.order.blocks))
        return min(request.load_end + 1 - request.num_computed_tokens, budget)

    late.beside.decide = decide
    release_after_loads(late)
    late.check(llm.generate(PROMPT, GREEDY)[0], reused=0)
    assert not store.held
    late.check_rest()
    until(lambda: torch.equal(store.frames.get(key, frame[:0]), frame))


# ---------------------------------------------------------------------- stores that hang


def test_a_store_that_hangs_is_not_waited_for_and_writes_nothing_later(late):
    llm = late.open()
    late.hold(13)
    late.beside.decide = late.once_the_store_waits
    batches = watch_batches(llm)
    output = llm.generate(PROMPT, SamplingParams(max_tokens=1))[0]
    late.check(output, reused=0, max_tokens=1)
    assert sum(count for ((_, count),) in batches) == len(PROMPT)
    until(llm.reset_prefix_cache)
    check_idle(llm)
    staging = worker(llm)._access.staging
    assert staging.num_free < staging.num_slots
    pools = [llm._kv.pool_tensor(group) for group in range(len(llm.layouts))]
    for pool in pools:
        pool.fill_(12)
    before = [pool.clone() for pool in pools]
    late.store.release()
    until(lambda: staging.num_free == staging.num_slots)
    assert all(map(torch.equal, pools, before))
    late.check_rest()


@pytest.mark.parametrize(
    ("model", "max_num_tokens"),
    [("llama", 3), *((model, 16 * T) for model in ("qwen3_next", "mamba2", "mamba"))],
    indirect=["model"],
)
def test_a_store_that_hangs_costs_no_wait(max_num_tokens, late_by_default):
    """A load may take ten minutes. The chunks of `mamba` behind the first are single tokens."""
    late = late_by_default
    late.open(max_num_tokens=max_num_tokens)
    for held in (13, 5):
        late.hold(held)
        late.ask()


# ---------------------------------------------------------------------- requests that end early


def test_aborted(late):
    llm = late.open()
    for computed in (0, 2, 7, 10):
        late.hold(11)
        reached = threading.Event()
        late.beside.decide = stop_at(computed * T, reached)
        handle = late.submit()
        assert reached.wait(60)
        handle.abort()
        assert handle.result(timeout=60).finish_reason == "abort"
        until(lambda: llm.stats().free_blocks == llm.stats().max_blocks)
        llm._engine._kv.blocks.check_invariants()
        late.store.release()
        late.beside.decide = whole_blocks
        again = late.ask()  # reuses what was computed, and none of what was loaded
        snapshots = 4 if any(one.states for one in llm.layouts) else 1
        assert again.reused_device_tokens == computed // snapshots * snapshots * T


class FewStates(KVCacheManager):
    """With memory for three snapshots of states."""

    def __init__(self, config, layouts, device):
        super().__init__(config, layouts, device, num_blocks={None: 64, T: 3})


@models("qwen3_next")
def test_aborted_as_it_joins_its_load_it_saves_no_snapshot_that_others_overwrite(late):
    """The loaded states free the snapshot before, whose block other requests then use."""
    llm, store = late.open(max_num_tokens=20 * T, kv_cache_manager=FewStates), late.store
    keys, engine = late.keys, llm._engine
    snapshot = {key for key in keys[3] if store.blocks[key][0] == 1}
    for key in snapshot:
        del store.frames[key]
    store.writable, store.lost, store.held = True, keys[3] - snapshot, keys[4]
    step, forward, others = engine.step, engine._model.forward, []

    def decide(request: LlmRequest, _budget: int) -> int:
        load = loads(llm)._overlapping[request.request_id]
        until(lambda: load.stop < len(load.order.blocks) and load.reading == 1)
        return 4 * T

    def end_load_and_forward(plan):
        for load in loads(llm)._overlapping.values():
            store.release()
            until(lambda load=load: load.ended)
        return forward(plan)

    def step_and_abort() -> bool:
        worked = step()
        joined = [one for one in engine._scheduler.running if one.num_computed_tokens == late.end]
        if joined and not others:
            once = SamplingParams(max_tokens=1)
            others.extend(llm.submit(words(5 * T, seed), once) for seed in (40, 41))
            engine.abort(joined[0].request_id)
        return worked

    late.beside.decide = decide
    engine._model.forward, engine.step = end_load_and_forward, step_and_abort
    assert late.submit().result(timeout=60).finish_reason == "abort"
    assert [one.result(timeout=60).finish_reason for one in others] == ["length"] * 2
    late.check_rest()
    assert not snapshot & store.frames.keys()


@pytest.mark.parametrize(
    ("state", "computed", "is_gone"),
    [
        (RequestState.LOADING, 4, False),
        (RequestState.LOADING, 10, True),
        (RequestState.CONTEXT, 4, True),
        (RequestState.CONTEXT, 10, False),
    ],
)
def test_preempted(state, computed, is_gone, late):
    """While it loads, and after a load that brought only the end; the store may be empty then."""
    llm, store, keys = late.open(max_num_tokens=T), late.store, late.keys
    is_loading = state is RequestState.LOADING
    store.failing = keys[10]
    late.hold(13 if is_loading else 0)
    late.beside.decide = whole_blocks if is_loading else nothing

    def is_due(request: LlmRequest) -> bool:
        if request.state is not state or request.num_computed_tokens != computed * T:
            return False
        assert request.load_end == late.end
        assert request.loaded_from == (late.end if is_loading else 11 * T)
        store.failing = set()
        store.release()
        if is_gone:
            store.frames.clear()
        return True

    sent = send_back_once(llm, is_due)
    output = llm.generate(PROMPT, GREEDY)[0]
    assert len(sent) == output.preemptions == 1
    late.check_tokens(output)
    if is_gone:
        assert output.reused_store_tokens == 0
    late.check_rest()


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("model", "scheduling"),
    [("mixed", "guaranteed_no_evict"), ("qwen3_next", "max_utilization")],
    indirect=["model"],
)
def test_without_room_it_waits_for_its_load(scheduling, late, monkeypatch):
    crowd(monkeypatch)
    llm = late.open(scheduling=scheduling)
    late.hold(13)
    asked = 0

    def decide(request: LlmRequest, budget: int) -> int:
        nonlocal asked
        assert request.num_computed_tokens == 0
        asked += 1
        if asked == 3:
            late.store.release()
        llm._thread._inbox.ring()
        return whole_blocks(request, budget)

    late.beside.decide = decide
    late.ask(reused=late.end)
    assert asked >= 3


@models("mixed", "qwen3_next")
def test_without_room_a_load_that_failed_sends_it_back(late, monkeypatch):
    crowd(monkeypatch)
    llm = late.open()
    late.store.failing = late.keys[11]
    late.beside.decide = nothing
    output = llm.generate(PROMPT, GREEDY)[0]
    late.check_tokens(output)
    assert output.preemptions == 2  # then it is computed without the store
    late.check_rest()
