"""Models with recurrent states: a prompt is computed while the state at its end is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from beside import (
    GREEDY,
    PROMPT,
    PROMPTS,
    STORMY,
    Arrivals,
    Beside,
    Storm,
    T,
    check,
    check_nothing_is_left,
    connector,
    crowd,
    loads,
    nothing,
    send_back_once,
    stop_at,
    until,
    whole_blocks,
    words,
    worker,
)
from late_store import LateStore
from observed import check_idle, tokens, watch_batches

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.backend import StoredBlock
from kvconnect.backends.guard.breaker import Breaker
from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch

END = 12 * T
"""A match ends with a state, which is at the end of a block."""
FAMILIES = ["qwen3_next", "mamba2"]  # the second one has no attention
LESS_OFTEN = ["lfm2", "falcon_h1"]
ALL = ["qwen3_next", *(pytest.param(one, marks=pytest.mark.slow) for one in LESS_OFTEN)]
ANY = [*ALL, pytest.param("mamba2", marks=pytest.mark.slow)]


class StateStore(LateStore):
    """Knows the group and the tokens of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[BlockKey, tuple[int, list[int]]] = {}

    def become(self, other: StateStore) -> None:
        super().become(other)
        self.blocks = dict(other.blocks)

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        self.blocks |= {one.key: (one.group, one.tokens.tolist()) for one in blocks}
        return await super().save(blocks)

    def keys_at(self, prompt: list[int], *, states: bool = True) -> list[set[BlockKey]]:
        """The keys of each block of `prompt`, also those of the states at its end."""
        parts = [prompt[at : at + T] for at in range(0, len(prompt) - T + 1, T)]
        groups = {group for group, _ in self.blocks.values()}
        last = max(groups)
        return [
            {
                key
                for key, (group, own) in list(self.blocks.items())
                if own == part and (states or group < last)
            }
            for part in parts
        ]


def cache(**more: object) -> KvCacheConfig:
    return KvCacheConfig(
        **{"tokens_per_block": T, "max_tokens": 1024, "state_interval": 4 * T} | more
    )


@pytest.fixture(scope="module", params=ALL)
def model(request, tiny) -> Path:
    return tiny(request.param)


@pytest.fixture(scope="module")
def saved(model: Path) -> StateStore:
    """A store that has every prompt of PROMPTS, with states every four blocks and at the ends."""
    store = StateStore()
    with LLM(model, kv_cache=cache(), dtype="float64", connector=connector(store)) as llm:
        for prompt in PROMPTS:
            llm.generate(prompt, SamplingParams(max_tokens=1))
    return store


@pytest.fixture
def store(saved: StateStore) -> Iterator[StateStore]:
    store = StateStore()
    store.become(saved)
    store.frozen = True
    yield store
    store.release()


@pytest.fixture
def beside(monkeypatch) -> Beside:
    return Beside(monkeypatch)


@pytest.fixture
def arrivals(monkeypatch) -> Arrivals:
    return Arrivals(monkeypatch)


@pytest.fixture
def open_late(open_llm, model, store) -> Callable[..., LLM]:
    def open_one(**how: object) -> LLM:
        more = how.pop("cache", {})
        how = {"max_num_tokens": 3 * T + 5, "kv_cache": cache(**more)} | how
        llm = open_llm(model, connector=connector(store), **how)
        worker(llm)._access.call_blocks = 1
        return llm

    return open_one


def behind(number: int, model: Path) -> int:
    """The token from which on all is loaded, once every block from `number` on is there.

    Without attention only the state is loaded.
    """
    number = 0 if model.name.startswith("mamba") and number < 12 else number
    return min(END, number * T)


def after(llm: LLM, arrivals: Arrivals, met: int) -> Callable[[LlmRequest, int], int]:
    """Decides to compute once all from `met` on is loaded, and the engine knows it."""

    def decide(request: LlmRequest, budget: int) -> int:
        load = loads(llm)._overlapping.get(request.request_id)
        if load is None:
            return 0  # it has ended, which the engine is about to see
        arrivals.wait(load, load.order.num_from(-(-met // T)))
        if request.loaded_from > met:
            llm._thread._inbox.ring()
            return 0
        return whole_blocks(request, budget)

    return decide


# ---------------------------------------------------------------------- where they meet


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
def test_they_meet_at_every_block(store, open_late, beside, arrivals, reference, model):
    (expected,) = reference(model, [PROMPT], 12)
    keys = store.keys_at(PROMPT)
    llm = open_late()
    for number in range(len(keys) + 1):
        store.held = set().union(*keys[:number])
        beside.decide = after(llm, arrivals, behind(number, model))
        output = llm.generate(PROMPT, GREEDY)[0]
        check(output, expected, reused=END - behind(number, model))
        check_nothing_is_left(llm, store)
    assert beside.asked > 13


@pytest.mark.parametrize("model", ["mamba2"], indirect=True)
@pytest.mark.parametrize("how", ["held", "lost", "broken", "failing"])
def test_blocks_that_only_count_tokens_are_saved_and_not_loaded(
    how, store, open_late, beside, reference, model
):
    llm, counts = open_late(), set().union(*store.keys_at(PROMPT, states=False))
    assert len(counts) == 12
    setattr(store, how, counts)
    beside.decide = nothing
    check(llm.generate(PROMPT, GREEDY)[0], *reference(model, [PROMPT], 12), reused=END)
    check_nothing_is_left(llm, store)


HOW = {
    "drafts": {"speculative": NgramSpeculation(num_draft_tokens=5, min_ngram_size=1)},
    "undivided": {"enable_chunked_prefill": False, "max_num_tokens": 16 * T},
    "one block a step": {"max_num_tokens": T},
    "preempting": {"scheduling": "max_utilization", "cache": {"max_tokens": 18 * T}},
    "a snapshot at each block": {"cache": {"state_interval": T}},
}


@pytest.mark.parametrize("model", ANY, indirect=True)
@pytest.mark.parametrize("how", HOW)
def test_however_it_is_served(how, store, open_late, beside, arrivals, reference, model):
    prompt = [*PROMPT[:END], *PROMPT[:5]]  # drafts find something
    (expected,) = reference(model, [prompt], 12)
    llm = open_late(**HOW[how])
    for number in (12, 7, 0):
        store.held = set().union(*store.keys_at(PROMPT)[:number])
        beside.decide = after(llm, arrivals, behind(number, model))
        check(llm.generate(prompt, GREEDY)[0], expected, reused=END - behind(number, model))
        check_nothing_is_left(llm, store)


@pytest.mark.parametrize("num_tokens", [1, T - 1])
def test_a_chunk_that_ends_inside_a_block(
    num_tokens, store, open_late, beside, arrivals, reference, model
):
    keys = store.keys_at(PROMPT)
    llm = open_late(cache={"state_interval": 16 * T}, max_num_tokens=12 * T)
    for held in (3, 9, 11):
        store.held = set().union(*keys[:held])

        def decide(request: LlmRequest, _budget: int, held: int = held) -> int:
            load = loads(llm)._overlapping.get(request.request_id)
            if load is None or request.num_computed_tokens:
                return 0
            arrivals.wait(load, load.order.num_from(held))
            return held * T + num_tokens  # whether or not the engine knows yet what has come

        beside.decide = decide
        output = llm.generate(PROMPT, GREEDY)[0]
        check(output, *reference(model, [PROMPT], 12), reused=max(0, END - (held + 1) * T))
        check_nothing_is_left(llm, store)


@pytest.mark.parametrize("model", ANY, indirect=True)
@pytest.mark.parametrize("num_tokens", [4 * T + 3, 8 * T + 1])
def test_behind_what_the_device_has(
    num_tokens, store, open_late, beside, arrivals, reference, model
):
    """Its computing begins with a snapshot of the device, which is not held meanwhile."""
    llm = open_late()
    frames, begin = store.frames, num_tokens // T * T
    for number in (12, 10, 8):
        beside.decide, store.frames = nothing, {}
        llm.generate(PROMPT[:num_tokens], SamplingParams(max_tokens=1))
        store.frames = frames
        store.held = set().union(*store.keys_at(PROMPT)[:number])
        met = max(behind(number, model), begin)
        beside.decide = after(llm, arrivals, met)
        output = llm.generate(PROMPT, GREEDY)[0]
        check(output, *reference(model, [PROMPT], 12), reused=END - met)
        assert output.reused_device_tokens == begin
        check_nothing_is_left(llm, store)


@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.CONTEXT])
def test_the_snapshot_where_they_meet_is_kept(
    state, store, open_late, beside, arrivals, reference, model
):
    """While it loads, and after a load that brought only the end."""
    llm, keys = open_late(), store.keys_at(PROMPT)
    if state is RequestState.LOADING:
        store.held = set().union(*keys[:8])
        beside.decide = after(llm, arrivals, 8 * T)
    else:
        store.failing = keys[7]
        beside.decide = nothing
    check(llm.generate(PROMPT, GREEDY)[0], *reference(model, [PROMPT], 12), reused=4 * T)
    store.failing, beside.decide = set(), nothing
    for common, reused in ((5 * T, 4 * T), (11 * T, 8 * T)):
        prompt = [*PROMPT[:common], *words(9, 7)]
        output = llm.generate(prompt, GREEDY)[0]
        check(output, *reference(model, [prompt], 12), reused=0)
        assert output.reused_device_tokens == reused
    check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- stores that fail


def test_without_the_state_at_the_end_nothing_is_reused(
    store, open_late, beside, arrivals, reference, model
):
    """Though all keys and values are there."""
    llm = open_late()
    keys = store.keys_at(PROMPT)[11] - store.keys_at(PROMPT, states=False)[11]
    assert keys
    store.held = keys

    def decide(request: LlmRequest, budget: int) -> int:
        assert store.waits.wait(60)
        return whole_blocks(request, budget)

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(model, [PROMPT], 12), reused=0)
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("how", ["lost", "broken", "failing"])
def test_what_is_behind_a_missing_block_is_used(
    how, saved, store, open_late, beside, reference, model
):
    """If the state at the end is there. What lies before is computed."""
    (expected,) = reference(model, [PROMPT], 12)
    llm = open_late()
    for number in (11, 8, 2):
        for key in store.keys_at(PROMPT)[number]:
            store.become(saved)
            is_needed = number == 11 or key in store.keys_at(PROMPT, states=False)[number]
            setattr(store, how, {key})
            beside.decide = nothing
            reused = END - (number + 1) * T if is_needed else END
            check(llm.generate(PROMPT, GREEDY)[0], expected, reused=reused)
            check_nothing_is_left(llm, store)


def test_a_store_that_hangs_is_not_waited_for_and_writes_nothing_later(
    store, open_late, beside, reference, model
):
    llm = open_late()
    store.held = set().union(*store.keys_at(PROMPT))
    batches = watch_batches(llm)

    def decide(request: LlmRequest, budget: int) -> int:
        assert store.waits.wait(60)
        return whole_blocks(request, budget)

    beside.decide = decide
    output = llm.generate(PROMPT, SamplingParams(max_tokens=1))[0]
    check(output, *reference(model, [PROMPT], 1), reused=0)
    assert sum(count for ((_, count),) in batches) == len(PROMPT)
    until(llm.reset_prefix_cache)
    check_idle(llm)
    staging = worker(llm)._access.staging
    memory = llm._kv.pool_tensor(len(llm.layouts) - 1)  # that of all pools
    memory.fill_(12)
    store.release()
    until(lambda: staging.num_free == staging.num_slots)
    assert (memory == 12).all()
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("computed", [0, 4, 7, 10])
def test_aborted(computed, store, open_late, beside, reference, model):
    llm = open_late()
    store.held = set().union(*store.keys_at(PROMPT)[:11])
    reached = threading.Event()
    beside.decide = stop_at(computed * T, reached)
    handle = llm.submit(PROMPT, GREEDY)
    assert reached.wait(60)
    handle.abort()
    assert handle.result(timeout=60).finish_reason == "abort"
    until(lambda: llm.stats().free_blocks == llm.stats().max_blocks)
    llm._engine._kv.blocks.check_invariants()
    store.release()
    beside.decide = whole_blocks
    again = llm.generate(PROMPT, GREEDY)[0]
    check(again, *reference(model, [PROMPT], 12))
    assert again.reused_device_tokens == computed // 4 * 4 * T  # and none of what was loaded
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("computed", [4, 6, 10])
@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.CONTEXT])
def test_preempted(computed, state, store, open_late, beside, reference, model):
    """While it loads, and after a load that brought only the end."""
    keys = store.keys_at(PROMPT)
    llm = open_late(max_num_tokens=T)
    store.failing = keys[10]
    if state is RequestState.LOADING:
        store.held = set().union(*keys)
    beside.decide = whole_blocks if state is RequestState.LOADING else nothing

    def is_due(request: LlmRequest) -> bool:
        if request.state is not state or request.num_computed_tokens != computed * T:
            return False
        assert request.load_end == END
        store.failing = set()
        store.release()
        return True

    sent = send_back_once(llm, is_due)
    output = llm.generate(PROMPT, GREEDY)[0]
    assert len(sent) == output.preemptions == 1
    assert list(output.output_token_ids) == reference(model, [PROMPT], 12)[0]
    check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("scheduling", ["guaranteed_no_evict", "max_utilization"])
def test_without_room_it_waits_for_its_load(
    scheduling, store, open_late, beside, reference, model, monkeypatch
):
    crowd(monkeypatch)
    llm = open_late(scheduling=scheduling)
    store.held = set().union(*store.keys_at(PROMPT))
    asked = 0

    def decide(request: LlmRequest, budget: int) -> int:
        nonlocal asked
        assert request.num_computed_tokens == 0
        asked += 1
        if asked == 3:
            store.release()
        llm._thread._inbox.ring()
        return whole_blocks(request, budget)

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(model, [PROMPT], 12), reused=END)
    assert asked >= 3
    check_nothing_is_left(llm, store)


def test_without_room_a_load_that_failed_sends_it_back(
    store, open_late, beside, reference, model, monkeypatch
):
    crowd(monkeypatch)
    llm = open_late()
    store.failing = store.keys_at(PROMPT)[11]
    beside.decide = nothing
    output = llm.generate(PROMPT, GREEDY)[0]
    assert list(output.output_token_ids) == reference(model, [PROMPT], 12)[0]
    assert output.preemptions == 2  # then it is computed without the store
    check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- as it is by default


@pytest.mark.parametrize("model", [*FAMILIES, "mamba"], indirect=True)
def test_a_store_that_hangs_costs_no_wait(store, open_late, reference, model):
    """A load may take ten minutes. The chunks of `mamba` behind the first are single tokens."""
    llm = open_late(max_num_tokens=16 * T)
    (expected,) = reference(model, [PROMPT], 12)
    for held in (12, 5):
        store.held = set().union(*store.keys_at(PROMPT)[:held])
        check(llm.generate(PROMPT, GREEDY)[0], expected)
        check_nothing_is_left(llm, store)


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
@pytest.mark.parametrize("number", [3, 5, 12])
def test_mixers_that_step_reach_their_load_in_one_chunk(
    number, store, open_late, beside, arrivals, reference, model
):
    """A snapshot that is due before ends no chunk: behind it they would wait for the store."""
    llm = open_late(max_num_tokens=16 * T)
    store.held = set().union(*store.keys_at(PROMPT)[:number])
    meet = after(llm, arrivals, behind(number, model))
    beside.decide = lambda request, budget: (
        0 if request.num_computed_tokens else meet(request, budget)
    )
    output = llm.submit(PROMPT, GREEDY).result(timeout=60)
    check(output, *reference(model, [PROMPT], 12), reused=END - behind(number, model))
    check_nothing_is_left(llm, store)


def test_mixers_that_step_compute_all_at_once_or_nothing():
    def scheduled(max_num_tokens: int, computed: int) -> int:
        paces = BesideLoads(max_num_tokens, lambda: 1, stepped=True)
        for size in (T, 100, 1 << 10):
            paces._steps.record(size, size * size / 2, 0.001 + size * 1e-6)
        paces._loads.record((T, 5.0), (100 * T, 500.0), piece=T, gap_s=5.0, total=100 * T)
        request = LlmRequest(
            1, np.array(PROMPT, np.int32), chain_root=BlockKey(bytes(32)), tokens_per_block=T
        )
        request.load_end = request.loaded_from = END
        request.num_computed_tokens = computed
        batch = ScheduledBatch()
        for _ in range(2):
            paces.add_chunk(batch, [request])
        return sum(one.num_scheduled_tokens for one in batch.requests)

    assert scheduled(1 << 10, 0) == len(PROMPT)
    assert scheduled(END - 1, 0) == 0
    assert scheduled(1 << 10, T) == 0


def test_large_states_are_loaded_in_parts(tiny, open_llm, beside, arrivals, reference, monkeypatch):
    """Their layers are in frames of their own, and all are there before the request jumps."""
    divided = KvCacheLayout.divided
    monkeypatch.setattr(KvCacheLayout, "divided", lambda layout: divided(layout, 1))
    store, model = StateStore(), tiny("qwen3_next")
    llm = open_llm(model, connector=connector(store), kv_cache=cache(), max_num_tokens=3 * T)
    worker(llm)._access.call_blocks = 1
    llm.generate(PROMPT, GREEDY)
    store.frozen = True
    assert {group for group, _ in store.blocks.values()} == {0, 1, 2}
    until(lambda: worker(llm)._queue.flush(1) and llm.reset_prefix_cache())
    last = [key for key, (group, own) in store.blocks.items() if group and own == PROMPT[88:96]]
    for held, reused in ((set(last[1:]), 0), (store.keys_at(PROMPT)[3], 8 * T)):
        store.held = held
        if reused:
            beside.decide = after(llm, arrivals, END - reused)
        else:
            beside.decide = lambda request, budget: (
                store.waits.wait(60) and whole_blocks(request, budget)
            )
        output = llm.generate(PROMPT, GREEDY)[0]
        check(output, *reference(model, [PROMPT], 12), reused=reused)
        check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- two ranks


@pytest.mark.slow  # two engines of two processes
def test_ranks_jump_once_the_slowest_has_all(tiny, reference, beside, tmp_path, monkeypatch):
    """See `uneven_ranks`. Every rank computes with the same states, or sums of them differ."""
    url, model = f"disk://{tmp_path}/store?capacity=64MiB", tiny("qwen3_next")
    how = {
        "tensor_parallel_size": 2,
        "kv_cache": cache(),
        "dtype": "float64",
        "device": "cpu",
        "max_num_tokens": 3 * T,
    }
    asked = [PROMPT, words(9 * T + 2, 5)]
    expected = reference(model, asked, 12)
    with LLM(model, connector=KvCacheConnectorConfig(url=url), **how) as llm:
        assert tokens(llm.generate(asked, GREEDY)) == expected
    monkeypatch.setenv("UNEVEN_STORE", url)
    uneven = KvCacheConnectorConfig(
        lookup_timeout_ms=60_000,
        overlap_loads=True,
        connector_module="uneven_ranks",
        connector_scheduler_class="Scheduler",
        connector_worker_class="Worker",
    )
    with LLM(model, connector=uneven, **how) as llm:
        beside.decide = lambda request, budget: min(T, whole_blocks(request, budget))
        first, second = (llm.generate(prompt, GREEDY)[0] for prompt in asked)
        check(first, expected[0])
        # The second rank got a block with each that was computed, the state among the first two.
        assert 0 < first.reused_store_tokens < 8 * T
        check(second, expected[1])
        assert 0 < second.reused_store_tokens < 9 * T  # one block did not come
        assert beside.asked > 0
        until(llm.reset_prefix_cache)
        check_idle(llm)


# ---------------------------------------------------------------------- anything at any time


@pytest.fixture(scope="module", params=STORMY)
def storm(request, model: Path) -> Iterator[Storm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Breaker, "open", lambda *_: None)  # the store is asked all the time
        beside, store = Beside(patch), StateStore()
        how = {"kv_cache": cache(max_tokens=34 * T), "dtype": "float64"}
        with LLM(model, connector=connector(store), **how, **STORMY[request.param]) as llm:
            yield Storm(llm, store, beside)
            store.release()


@pytest.mark.parametrize("model", ANY, indirect=True)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_happens_no_token_is_wrong_and_nothing_is_left(
    seed, storm, saved, reference, model
):
    expected = dict(enumerate(reference(model, PROMPTS, 12)))
    for number in range(400 if seed else 4):
        storm.run(1000 * seed + number, saved, expected)
