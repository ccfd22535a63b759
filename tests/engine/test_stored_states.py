"""Recurrent states go to a store and come back: answers are as without, after a restart too."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest
from frame_store import RESTORED, FrameStore, cache, loaded, random_trees, restarted, reused
from observed import check_rest, patient, preempt, slow, tokens

from kvconnect import LLM, KvCacheConnectorConfig, PromptStore, SamplingParams
from kvconnect.backend import Backend
from kvconnect.cache.pool.slabs import Slabs
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import metrics

GREEDY = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
FAMILIES = ["qwen3_next", "mamba2", "falcon_h1"]
LESS_OFTEN = ["lfm2", "jamba", "kimi_linear", "lfm3", "minimax", "zaya"]
ALL = [*FAMILIES, *slow(*LESS_OFTEN)]


def connector(store: str | Backend, **more: object) -> KvCacheConnectorConfig:
    return patient(store, **{"staging_bytes": 8 << 20} | more)


# ---------------------------------------------------------------- restarts


@pytest.mark.parametrize("family", ALL)
def test_preempted_restarted_and_reused(family, tiny, open_llm, reference, several, tmp_path):
    expected = reference(tiny(family), several, 12)
    store = connector(f"disk://{tmp_path}/kv?capacity=64MiB")
    options = {"kv_cache": cache(), "connector": store, "max_num_tokens": 25}
    llm = open_llm(tiny(family), **options)
    sent = preempt(llm, lambda request: request.num_generated_tokens in {3, 8})
    for _ in range(2):  # they are saved and restored, then loaded
        assert tokens(llm.generate(several, GREEDY)) == expected
        restarted(llm)
    assert sent
    llm.close()
    llm = open_llm(tiny(family), **options)
    for counts in (loaded, reused):
        outputs = llm.generate(several, GREEDY)
        assert tokens(outputs) == expected
        assert counts(outputs) == RESTORED
    check_rest(llm)


@pytest.mark.parametrize("more", [{}, {"save_on": "finish", "on_backlog": "wait"}])
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


@pytest.mark.parametrize("tries", [100, *slow(1000)])
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
        await asyncio.wait_for(never.wait(), 0.6)

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


@pytest.mark.parametrize("count", [40, *slow(1000)])
@pytest.mark.parametrize("save_on", ["full", *slow("finish")])
def test_random_trees_in_a_small_cache_with_a_store(count, save_on, tiny, open_llm):
    """Snapshots are reclaimed while others are saved and loaded; what is loaded is right."""
    config = cache(max_tokens=256, tokens_per_block=4, state_interval=16)
    store = connector(FrameStore(), save_on=save_on)
    cached = open_llm(tiny("lfm2"), kv_cache=config, max_num_tokens=24, connector=store)
    fresh = open_llm(tiny("lfm2"), kv_cache=cache(enable_block_reuse=False))
    outputs = random_trees(cached, fresh, np.random.default_rng(count), count, restarted)
    assert sum(loaded(outputs)) > count
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
