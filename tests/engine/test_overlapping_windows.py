"""Models with windows: the beginning of a prompt is computed while its end is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
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
from observed import check_idle, tokens

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.backends.guard.breaker import Breaker
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.frame import HEADER_NBYTES
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest, RequestState

END = len(PROMPT) - 1
"""The last token of a prompt is always computed."""
ARCHS = ["mixed", "mistral", "gpt_oss"]
SLOW = [ARCHS[0], *(pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS[1:])]


class WindowStore(LateStore):
    """Knows the keys of a prompt in every pool group."""

    def keys_at(self, prompt: list[int]) -> list[set[BlockKey]]:
        """The keys of each block of `prompt`, of all groups that have it."""
        known = {one.key for children in list(self.after.values()) for one in children}
        at: list[set[BlockKey]] = []
        for root in self.after.keys() - known:
            view = LateStore()
            view.after.update({root: self.after[root]})
            view.after.update({key: self.after[key] for key in known & self.after.keys()})
            for key in known - self._below(root):
                view.after.pop(key, None)
            for number, key in enumerate(view.keys_of(prompt)):
                at += [set() for _ in range(number + 1 - len(at))]
                at[number].add(key)
        return at

    def _below(self, root: BlockKey | None) -> set[BlockKey]:
        found, todo = set(), [root]
        while todo:
            for child in self.after.get(todo.pop(), ()):
                found.add(child.key)
                todo.append(child.key)
        return found


@pytest.fixture(scope="module", params=SLOW)
def model(request, model_of, mixed, tiny) -> Path:
    if request.param == "gpt_oss":
        return tiny(request.param)
    return mixed if request.param == "mixed" else model_of(request.param)


@pytest.fixture(scope="module")
def saved(model: Path) -> WindowStore:
    """A store that has every prompt of PROMPTS, and the tail of each."""
    store = WindowStore()
    cache = KvCacheConfig(tokens_per_block=T, max_tokens=1024)
    with LLM(model, kv_cache=cache, dtype="float64", connector=connector(store)) as llm:
        for prompt in PROMPTS:
            llm.generate(prompt, SamplingParams(max_tokens=1))
    return store


@pytest.fixture
def store(saved: WindowStore) -> Iterator[WindowStore]:
    store = WindowStore()
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
        how = {"max_num_tokens": 3 * T + 5, "tokens_per_block": T} | how
        llm = open_llm(model, connector=connector(store), **how)
        worker(llm)._access.call_blocks = 1
        return llm

    return open_one


def windows(llm: LLM) -> list[int | None]:
    return [layout.window for layout in llm.layouts]


def behind(llm: LLM, number: int, end: int = END) -> int:
    """The token from which on all is loaded, once every block from `number` on is there."""
    first = min(blocks_needed(window, end, T).start for window in windows(llm))
    return 0 if number <= first else min(end, number * T)


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


@pytest.mark.parametrize(
    ("model", "has_tail"),
    [
        ("mixed", True),
        ("mistral", False),
        pytest.param("mixed", False, marks=pytest.mark.slow),
        pytest.param("mistral", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, marks=pytest.mark.slow),
    ],
    indirect=["model"],
)
def test_at_every_block(has_tail, store, open_late, beside, arrivals, reference, model):
    (expected,) = reference(model, [PROMPT], 12)
    keys = store.keys_at(PROMPT)
    end = END if has_tail else 12 * T
    if not has_tail:
        for key in keys.pop():
            del store.frames[key]
    llm = open_late()
    for number in range(len(keys) + 1):
        store.held = set().union(*keys[:number])
        met = behind(llm, number, end)
        beside.decide = after(llm, arrivals, met)
        output = llm.generate(PROMPT, GREEDY)[0]
        check(output, expected, reused=end - met)
        check_nothing_is_left(llm, store)
    assert beside.asked > 13


HOW = {
    "drafts": {"speculative": NgramSpeculation(num_draft_tokens=5, min_ngram_size=1)},
    "undivided": {"enable_chunked_prefill": False, "max_num_tokens": 16 * T},
    "one block a step": {"max_num_tokens": T},
    "preempting": {"scheduling": "max_utilization", "max_tokens": 18 * T},
}


@pytest.mark.parametrize("how", HOW)
def test_however_it_is_served(how, store, open_late, beside, arrivals, reference, model):
    prompt = [*PROMPT[: 12 * T], *PROMPT[:5]]  # drafts find something
    (expected,) = reference(model, [prompt], 12)
    llm = open_late(**HOW[how])
    for number in (12, 7, 0):
        store.held = set().union(*store.keys_at(PROMPT)[:number])
        met = behind(llm, number, 12 * T)
        beside.decide = after(llm, arrivals, met)
        check(llm.generate(prompt, GREEDY)[0], expected, reused=12 * T - met)
        check_nothing_is_left(llm, store)


@pytest.mark.parametrize("num_tokens", [1, T - 1, T + 2])
@pytest.mark.parametrize("held", [3, 9, 11])
def test_a_chunk_that_ends_inside_a_block(
    held, num_tokens, store, open_late, beside, arrivals, reference, model
):
    keys = store.keys_at(PROMPT)
    store.held = set().union(*keys[:held])
    llm = open_late(max_num_tokens=12 * T)

    def decide(request: LlmRequest, _budget: int) -> int:
        load = loads(llm)._overlapping.get(request.request_id)
        if load is None or request.num_computed_tokens:
            return 0
        arrivals.wait(load, load.order.num_from(held))
        return held * T + num_tokens  # whether or not the engine knows yet what has come

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    reused = max(0, END - (held + -(-num_tokens // T)) * T)
    check(output, *reference(model, [PROMPT], 12), reused=reused)
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("num_tokens", [3 * T + 3, 7 * T])
def test_behind_what_the_device_has(
    num_tokens, store, open_late, beside, arrivals, reference, model
):
    llm = open_late()
    beside.decide = nothing
    store.frames, frames = {}, store.frames
    llm.generate(PROMPT[:num_tokens], SamplingParams(max_tokens=1))
    store.frames = frames
    for number in (12, 9, 8):
        store.held = set().union(*store.keys_at(PROMPT)[:number])
        met = behind(llm, number) or num_tokens // T * T
        beside.decide = after(llm, arrivals, met)
        output = llm.generate([*PROMPT, number], GREEDY)[0]
        expected = reference(model, [[*PROMPT, number]], 12)
        check(output, *expected)
        assert output.reused_device_tokens >= num_tokens // T * T
        until(lambda: not loads(llm)._overlapping)
        store.release()
        until(llm.reset_prefix_cache)
        store.frames, frames = {}, store.frames
        beside.decide = nothing
        llm.generate(PROMPT[:num_tokens], SamplingParams(max_tokens=1))
        store.frames = frames
    check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- stores that fail


@pytest.mark.parametrize(
    "how", ["lost", *(pytest.param(how, marks=pytest.mark.slow) for how in ("broken", "failing"))]
)
def test_what_is_behind_a_missing_block_is_used(
    how, saved, store, open_late, beside, reference, model
):
    """What lies before it is computed, and saved anew."""
    (expected,) = reference(model, [PROMPT], 12)
    store.frozen = False
    llm = open_late()
    for number, keys in enumerate(store.keys_at(PROMPT)):
        for key in keys:
            store.become(saved)
            frame = store.frames[key].clone()
            setattr(store, how, {key})
            after_it = number % 2 == 1  # computes once the load has ended, which knows what to save
            if after_it and number < 8:  # no load needs the block of another group
                for other in keys - {key}:
                    store.frames.pop(other)
            beside.decide = nothing if after_it else whole_blocks
            check(llm.generate(PROMPT, GREEDY)[0], expected)
            check_nothing_is_left(llm, store)
            if how == "lost" and after_it:
                until(lambda keys=keys: keys <= store.frames.keys())
                got, wanted = (
                    one[HEADER_NBYTES:].view(torch.float64) for one in (store.frames[key], frame)
                )
                assert torch.allclose(got, wanted)


def test_a_store_that_hangs_is_not_waited_for_and_writes_nothing_later(
    store, open_late, beside, reference, model
):
    llm = open_late()
    store.held = set().union(*store.keys_at(PROMPT))

    def decide(request: LlmRequest, budget: int) -> int:
        assert store.waits.wait(60)
        return whole_blocks(request, budget)

    beside.decide = decide
    output = llm.generate(PROMPT, GREEDY)[0]
    check(output, *reference(model, [PROMPT], 12), reused=0)
    until(llm.reset_prefix_cache)
    check_idle(llm)
    staging = worker(llm)._access.staging
    pools = [llm._kv.pool_tensor(group) for group in range(len(llm.layouts))]
    for pool in pools:
        pool.fill_(12.5)
    store.release()
    until(lambda: staging.num_free == staging.num_slots)
    assert all((pool == 12.5).all() for pool in pools)
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("computed", [0, 2, 7, 10])
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
    assert again.reused_device_tokens == computed * T  # and none of what was loaded
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("computed", [2, 6, 10])
@pytest.mark.parametrize("state", [RequestState.LOADING, RequestState.CONTEXT])
def test_preempted(computed, state, store, open_late, beside, reference, model):
    """While it loads, and after a load that brought only the end."""
    keys = store.keys_at(PROMPT)
    llm = open_late(max_num_tokens=T)
    store.failing = set(keys[11])
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
    scheduling, store, open_late, beside, arrivals, reference, model, monkeypatch
):
    crowd(monkeypatch)
    llm = open_late(scheduling=scheduling)
    keys = store.keys_at(PROMPT)
    store.held = set().union(*keys)
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


def test_a_running_request_is_not_preempted_for_one_that_loads(
    store, open_late, beside, reference, model
):
    """The pool has room for both, if the second computes only as far as it may."""
    llm = open_late(max_tokens=22 * T, max_num_tokens=2 * T)
    long = SamplingParams(max_tokens=5 * T, ignore_eos=True)
    beside.decide = nothing
    other = words(2 * T, 9)
    running = llm.submit(other, long)
    next(running.stream())
    beside.decide = whole_blocks
    store.held = set().union(*store.keys_at(PROMPT)[:11])
    loading = llm.submit(PROMPT, GREEDY)
    first = running.result(60)
    store.release()
    assert first.preemptions == 0
    (expected,) = reference(model, [other], 5 * T)  # up to the end of the text
    assert list(first.output_token_ids)[: len(expected)] == expected
    check(loading.result(60), *reference(model, [PROMPT], 12))
    check_nothing_is_left(llm, store)


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_begins_alike(waits, store, open_late, beside, reference, model):
    """It waits if the whole load is of use to it."""
    llm = open_late()
    keys = store.keys_at(PROMPT)
    store.held = set().union(*keys[:6])
    other = [*PROMPT[: 12 * T + 5], *words(9, 5)] if waits else [*PROMPT[: 9 * T], *words(9, 5)]
    store.frames = {k: v for k, v in store.frames.items() if k not in keys[12]}
    reached = threading.Event()
    beside.decide = stop_at(3 * T, reached)
    first = llm.submit(PROMPT, GREEDY)
    assert reached.wait(60)

    def decide(request: LlmRequest, budget: int) -> int:
        goes_on = waits or request.prompt_len == len(other)
        return whole_blocks(request, budget) if goes_on else 0

    beside.decide = decide
    second = llm.submit(other, GREEDY)
    output = second.result(60)
    beside.decide = whole_blocks
    llm._thread._inbox.ring()
    check(first.result(60), *reference(model, [PROMPT], 12))
    check(output, *reference(model, [other], 12))
    assert output.reused_device_tokens == (12 * T if waits else 3 * T)
    check_nothing_is_left(llm, store)


# ---------------------------------------------------------------------- two ranks


@pytest.mark.slow  # two engines of two processes
def test_ranks_go_on_from_what_the_slowest_has(mixed, reference, beside, tmp_path, monkeypatch):
    """See `uneven_ranks`."""
    url = f"disk://{tmp_path}/store?capacity=64MiB"
    how = {
        "tensor_parallel_size": 2,
        "kv_cache": KvCacheConfig(tokens_per_block=T, max_tokens=60 * T),
        "dtype": "float64",
        "device": "cpu",
        "max_num_tokens": 3 * T,
    }
    asked = [PROMPT, words(9 * T + 2, 5)]
    expected = reference(mixed, asked, 12)
    with LLM(mixed, connector=KvCacheConnectorConfig(url=url), **how) as llm:
        assert tokens(llm.generate(asked, GREEDY)) == expected
    monkeypatch.setenv("UNEVEN_STORE", url)
    uneven = KvCacheConnectorConfig(
        lookup_timeout_ms=60_000,
        overlap_loads=True,
        connector_module="uneven_ranks",
        connector_scheduler_class="Scheduler",
        connector_worker_class="Worker",
    )
    with LLM(mixed, connector=uneven, **how) as llm:
        beside.decide = lambda request, budget: min(T, whole_blocks(request, budget))
        first, second = (llm.generate(prompt, GREEDY)[0] for prompt in asked)
        check(first, expected[0])
        # The second rank got a block with each that was computed, those of both pools in turn.
        assert 0 < first.reused_store_tokens < 8 * T
        check(second, expected[1])
        assert 0 < second.reused_store_tokens < 9 * T + 1  # one block did not come
        assert beside.asked > 0
        until(llm.reset_prefix_cache)
        check_idle(llm)


# ---------------------------------------------------------------------- anything at any time


@pytest.fixture(scope="module", params=STORMY)
def storm(request, model: Path) -> Iterator[Storm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Breaker, "open", lambda *_: None)  # the store is asked all the time
        beside, store = Beside(patch), WindowStore()
        cache = KvCacheConfig(tokens_per_block=T, max_tokens=34 * T)
        how = {"kv_cache": cache, "dtype": "float64", "connector": connector(store)}
        with LLM(model, **how, **STORMY[request.param]) as llm:
            yield Storm(llm, store, beside)
            store.release()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_happens_no_token_is_wrong_and_nothing_is_left(
    seed, storm, saved, reference, model
):
    expected = dict(enumerate(reference(model, PROMPTS, 12)))
    for number in range(1000 if seed else 4):
        storm.run(1000 * seed + number, saved, expected)
