"""Recurrent states go to a store and come back: answers are as without, after a restart too."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import numpy as np
import pytest
from frame_store import FrameStore, branches
from observed import check_idle, preempt, tokens

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, PromptStore, SamplingParams
from kvconnect.backend import Backend
from kvconnect.cache.pool.slabs import Slabs
from kvconnect.engine.model.states import StateSlots
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import metrics

GREEDY = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
FAMILIES = ["qwen3_next", "mamba2", "lfm2"]
LESS_OFTEN = ["falcon_h1", "jamba", "kimi_linear", "lfm3", "minimax", "zaya"]
ALL = [*FAMILIES, *(pytest.param(one, marks=pytest.mark.slow) for one in LESS_OFTEN)]


def cache(**more) -> KvCacheConfig:
    return KvCacheConfig(
        **{"tokens_per_block": 16, "max_tokens": 1024, "state_interval": 32} | more
    )


def connector(store: str | Backend, **more) -> KvCacheConnectorConfig:
    """A store that is waited for, on a busy machine too: what is loaded does not depend on time."""
    where = {"url": store} if isinstance(store, str) else {"backend": store}
    given = {"lookup_timeout_ms": 60_000, "load_timeout_s": 60, "staging_bytes": 8 << 20}
    return KvCacheConnectorConfig(**where, **given | {"overlap_loads": False} | more)


def loaded(outputs) -> list[int]:
    return [one.reused_store_tokens for one in outputs]


def restarted(llm: LLM) -> None:
    """Empties the device's cache, once all saves are written and no request holds a block."""
    until = time.monotonic() + 60
    while not llm.reset_prefix_cache():
        assert time.monotonic() < until
    assert llm._engine._connector._worker._saves.flush(60)


def check_rest(llm: LLM) -> None:
    """Nothing of a request is held, once the last saves and loads have ended."""
    restarted(llm)
    check_idle(llm)


# ---------------------------------------------------------------- restarts


@pytest.mark.parametrize("family", ALL)
def test_a_restarted_engine_starts_from_stored_states(
    family, tiny, open_llm, reference, prompts, tmp_path
):
    expected = reference(tiny(family), prompts, 12)
    store = connector(f"disk://{tmp_path}/kv?capacity=64MiB")
    options = {"kv_cache": cache(), "connector": store, "max_num_tokens": 25}
    # Of prompts of 70, 33, 5, 16, 100, 1, 90 tokens and one that branches off at 50.
    for counts in ([0] * 8, [64, 32, 0, 0, 96, 0, 80, 48]):
        llm = open_llm(tiny(family), **options)
        outputs = llm.generate(prompts, GREEDY)
        assert tokens(outputs) == expected
        assert loaded(outputs) == counts
        check_rest(llm)
        llm.close()


def test_preempted_requests_load_and_save_states(tiny, open_llm, reference, prompts):
    expected = reference(tiny("qwen3_next"), prompts, 12)
    llm = open_llm(
        tiny("qwen3_next"), kv_cache=cache(), connector=connector(FrameStore()), max_num_tokens=25
    )
    sent = preempt(llm, lambda request: request.num_generated_tokens in {3, 8})
    for counts in ([0] * 8, [64, 32, 0, 0, 96, 0, 80, 48]):
        outputs = llm.generate(prompts, GREEDY)
        assert tokens(outputs) == expected
        assert [max(one, 0) for one in loaded(outputs)] >= counts
        restarted(llm)
    assert sent
    check_rest(llm)


@pytest.mark.parametrize("more", [{}, {"save_on": "finish"}, {"on_backlog": "wait"}])
def test_the_next_turn_loads_the_end_of_the_answer(more, tiny, open_llm, reference, prompts):
    store = FrameStore()
    turn, end = list(prompts[0]), 0
    for _ in range(3):
        llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector(store, **more))
        (output,) = llm.generate([turn], LONG)
        assert loaded([output]) == [end]
        assert tokens([output]) == reference(tiny("qwen3_next"), [turn], 20)
        llm.close()
        end = (len(turn) + 19) // 16 * 16
        turn += [*output.output_token_ids, 7, 8, 9]


def test_of_a_long_answer_few_snapshots_are_saved(tiny, open_llm, prompts):
    """There is one at the end of each block, which would be more than all keys and values."""
    store = FrameStore()
    llm = open_llm(
        tiny("qwen3_next"), kv_cache=cache(state_interval=64), connector=connector(store)
    )
    llm.generate([prompts[1]], SamplingParams(max_tokens=120, ignore_eos=True))
    restarted(llm)
    assert len(store.frames) - store.num_states == 9  # of 152 tokens
    assert store.num_states == 4  # at 32, 64, 128 and the last one at 144


def test_a_snapshot_whose_block_was_freed_is_not_saved(tiny, open_llm, prompts, monkeypatch):
    """There is no room for the one at 96, which frees the block of the one at 80 before."""
    store, refused = FrameStore(), []
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector(store))
    take = llm._engine._kv.state_snapshot

    def snapshot(request, position):
        if position != 96:
            return take(request, position)
        with monkeypatch.context() as full:
            full.setattr(Slabs, "ensure_free", lambda *_: False)
            refused.append(take(request, position))
        return refused[-1]

    llm._engine._kv.state_snapshot = snapshot
    llm.generate([prompts[0]], SamplingParams(max_tokens=30, ignore_eos=True))
    restarted(llm)
    assert refused == [None]
    assert len(store.frames) - store.num_states == 6
    assert store.num_states == 2  # at 32 and 64


def test_a_model_that_forgets_a_state_is_seen(tiny, open_llm, reference, prompts, monkeypatch):
    """Or none of these tests would see a wrong one."""
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector(FrameStore()))
    llm.generate(prompts, GREEDY)
    restarted(llm)
    restore = StateSlots.restore

    def empty(self, request_id, num_tokens, snapshot):
        restore(self, request_id, num_tokens, {key: one * 0 for key, one in snapshot.items()})

    monkeypatch.setattr(StateSlots, "restore", empty)
    assert tokens(llm.generate(prompts, GREEDY)) != reference(tiny("qwen3_next"), prompts, 12)


def test_a_loaded_state_stays_on_the_device(tiny, open_llm, prompts):
    """Though its request takes a snapshot behind it right away."""
    store = FrameStore()
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector(store))
    once = SamplingParams(max_tokens=1)
    llm.generate([prompts[0]], once)
    restarted(llm)
    longer = [*prompts[0][:64], *prompts[4]]
    (output,) = llm.generate([longer], once)
    assert loaded([output]) == [64]
    (output,) = llm.generate([prompts[0]], once)
    assert (output.reused_store_tokens, output.reused_device_tokens) == (0, 64)


@pytest.fixture
def in_parts(monkeypatch) -> None:
    """Stores keep the states of each layer in a frame of its own, as if they were large."""
    divided = KvCacheLayout.divided
    monkeypatch.setattr(KvCacheLayout, "divided", lambda layout: divided(layout, 1))


def test_large_states_are_stored_in_parts(tiny, open_llm, reference, prompts, in_parts):
    store = FrameStore()
    for count in (0, 64, 32, 64):
        llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector(store))
        outputs = llm.generate([prompts[0]], GREEDY)
        assert tokens(outputs) == reference(tiny("qwen3_next"), [prompts[0]], 12)
        assert loaded(outputs) == [count]
        llm.close()
        if count == 64:  # of the snapshots at 32 and 64 tokens the second one loses a part
            store.frames.pop([key for key, group in store.groups.items() if group == 2][1])
    assert set(store.groups.values()) == {0, 1, 2}  # two recurrent layers


# ---------------------------------------------------------------- stores that fail


@pytest.mark.parametrize("tries", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_frame_that_is_missing_old_or_damaged_is_never_served(
    tries, tiny, open_llm, prompts, in_parts
):
    store = FrameStore()
    llm = open_llm(tiny("lfm2"), kv_cache=cache(), connector=connector(store))
    once = SamplingParams(max_tokens=3, ignore_eos=True)
    asked = [prompts[0], prompts[7], prompts[1]]  # the second one leaves the first one at 50
    fresh = open_llm(tiny("lfm2"), kv_cache=cache(enable_block_reuse=False))
    expected = [tokens(fresh.generate([one], once)) for one in asked]
    for _ in range(2):
        for one in asked:
            llm.generate([one], once)
        restarted(llm)
    whole, store.writable = dict(store.frames), False
    usual = [64, 48, 32]
    rng = random.Random(tries)
    torn = 0
    for _ in range(tries):
        store.frames = dict(whole)
        key = rng.choice(list(whole))
        match rng.choice(("missing", "old", "damaged")):
            case "missing":
                del store.frames[key]
            case "old":
                store.frames[key] = whole[rng.choice([one for one in whole if one != key])]
            case _:
                bad = whole[key].clone()
                bad[rng.randrange(64, bad.numel())] ^= 1 + rng.randrange(255)
                store.frames[key] = bad
        number = rng.randrange(len(asked))
        (output,) = llm.generate([asked[number]], once)
        assert tokens([output]) == expected[number]
        assert output.reused_store_tokens <= usual[number]
        torn += output.reused_store_tokens < usual[number]
        restarted(llm)
    assert torn > tries // 5  # many frames are a part of the prompt that is asked
    check_rest(llm)


def test_a_store_that_raises_stalls_or_ends_costs_time_only(tiny, open_llm, reference, prompts):
    store, asked = FrameStore(), prompts[:2]
    expected = reference(tiny("qwen3_next"), asked, 12)
    open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector(store)).generate(asked)
    never = asyncio.Event()

    async def stalls() -> None:
        await asyncio.wait_for(never.wait(), 2)

    async def raises() -> None:
        raise OSError(5, "planted")

    for fault in (raises, stalls):
        store.at_load = fault
        llm = open_llm(
            tiny("qwen3_next"), kv_cache=cache(), connector=connector(store, load_timeout_s=0.2)
        )
        outputs = llm.generate(asked, GREEDY)
        assert (tokens(outputs), loaded(outputs)) == (expected, [0, 0])
        check_rest(llm)
        llm.close()


def test_an_aborted_load_frees_its_state(tiny, open_llm, reference, prompts):
    store = FrameStore()
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector(store))
    llm.generate([prompts[0]], GREEDY)
    restarted(llm)
    reached, go_on = threading.Event(), threading.Event()

    async def held() -> None:
        reached.set()
        await asyncio.to_thread(go_on.wait, 60)

    store.at_load = held
    handle = llm.generate_async(prompts[0], GREEDY)
    assert reached.wait(60)
    handle.abort()
    outputs = llm.generate(prompts[1:4], GREEDY)  # meanwhile others run
    go_on.set()
    assert tokens(outputs) == reference(tiny("qwen3_next"), prompts[1:4], 12)
    restarted(llm)
    store.at_load = None
    outputs = llm.generate([prompts[0]], GREEDY)
    assert tokens(outputs) == reference(tiny("qwen3_next"), [prompts[0]], 12)
    assert loaded(outputs) == [64]
    check_rest(llm)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("save_on", ["full", "finish"])
def test_random_trees_in_a_small_cache_with_a_store(count, save_on, tiny, open_llm):
    """Snapshots are reclaimed while others are saved and loaded; what is loaded is right."""
    rng = np.random.default_rng(count)
    config = cache(max_tokens=256, tokens_per_block=4, state_interval=16)
    cached = open_llm(
        tiny("lfm2"),
        kv_cache=config,
        max_num_tokens=24,
        connector=connector(FrameStore(), save_on=save_on),
    )
    fresh = open_llm(tiny("lfm2"), kv_cache=cache(enable_block_reuse=False))
    known: list[list[int]] = [[]]
    total = 0
    for _ in range(0, count, 4):
        batch = branches(rng, known)
        params = SamplingParams(max_tokens=int(rng.integers(1, 9)), ignore_eos=True)
        outputs = cached.generate(batch, params)
        assert tokens(outputs) == tokens(fresh.generate(batch, params))
        known += [[*one, *out.output_token_ids] for one, out in zip(batch, outputs, strict=True)]
        total += sum(loaded(outputs))
        if rng.integers(2):
            restarted(cached)
    assert total > count
    check_rest(cached)


# ---------------------------------------------------------------- verbs on stored prompts


def test_stored_prompts_are_warmed_moved_and_dropped_with_their_states(
    tiny, open_llm, prompts, tmp_path
):
    first, second = (f"disk://{tmp_path}/{name}?capacity=64MiB" for name in ("first", "second"))
    model, asked = tiny("qwen3_next"), [prompts[0], prompts[4]]
    options = {"kv_cache": cache()}
    llm = open_llm(model, connector=connector(first), **options)
    store = PromptStore(first, model)
    warmed = store.warm(llm, prompts=asked)
    assert (warmed.complete, warmed.tokens, warmed.missing) == (True, 64 + 96, 6 + 4)
    assert store.warm(llm, prompts=asked).present == 4 + 6
    llm.close()

    (reused, *_) = store.explain([*asked[1], 1, 2, 3]).spans
    assert (reused.end, str(reused.outcome)) == (96, "reused")
    (reused, missing, *_) = store.explain([*asked[1][:90], 1, 2, 3]).spans
    assert (reused.end, str(missing.outcome)) == (64, "no_state")  # a state is every 32 tokens
    assert store.pin(prompts=asked).blocks == (4 + 2) + (6 + 3)  # with a snapshot every 32 tokens
    store.export(tmp_path / "prompts", prompts=[asked[1]])
    PromptStore(second, model).import_(tmp_path / "prompts")
    llm = open_llm(model, connector=connector(second), **options)
    assert loaded(llm.generate(asked, GREEDY)) == [0, 96]
    llm.close()

    store.drop(prompts=[asked[0][:20]], continued=True)
    left = store.drop(prompts=[asked[1]])
    assert left.blocks == 6 + 3
    assert store.drop(everything=True).blocks == 0


# ---------------------------------------------------------------- why tokens are computed


def counts_of(output) -> dict[str, int]:
    return {str(outcome): count for outcome, count in output.explain().tokens.items()}


def no_state_tokens() -> float:
    return metrics.snapshot().get("engine.request.no_state_tokens", 0)


def test_tokens_without_a_state_on_the_device_are_counted(tiny, open_llm, prompts):
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(state_interval=64))
    once = SamplingParams(max_tokens=1)
    base = prompts[4]
    llm.generate([base], once)
    before = no_state_tokens()
    (output,) = llm.generate([[*base[:50], 200, 3, 4]], once)
    assert counts_of(output) == {"no_state": 48, "tail": 2, "diverged": 2, "last": 1}
    assert no_state_tokens() == before + 48


def test_tokens_without_a_state_in_the_store_are_counted(tiny, open_llm, prompts):
    store = FrameStore()
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache(), connector=connector(store))
    once = SamplingParams(max_tokens=1)
    llm.generate([prompts[0]], once)
    restarted(llm)
    store.drop_states()
    (output,) = llm.generate([prompts[0]], once)
    assert counts_of(output) == {"no_state": 64, "tail": 5, "last": 1}
    restarted(llm)
    assert store.num_states == 2  # at 32 and 64: computed, so saved again


# ---------------------------------------------------------------- refused


def test_without_reuse_a_connector_is_refused(tiny):
    with pytest.raises(ConfigurationError, match="a connector needs block reuse"):
        LLM(tiny("qwen3_next"), kv_cache=cache(enable_block_reuse=False), connector="memory:")
