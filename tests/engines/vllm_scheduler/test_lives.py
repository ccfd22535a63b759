"""Whole lives of engines with `KvConnect` around `StandInWorker`; see test_scheduler.py."""

from __future__ import annotations

import random
import time

import faulty_store
import pytest
from cases import LIMITS, PROMPTS, WHOLE
from stand_in_engine import SIZE
from stand_in_worker import STATE
from vllm_engine import connector, prompts_of

from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS

pytestmark = pytest.mark.engines

two_modes = pytest.mark.parametrize("start", ["v1", "v2-overlapping"], indirect=True)


@two_modes
def test_cold_device_hit_and_restart_give_the_same_tokens(start, store):
    with start(connector(store)) as first:
        wanted = first.wanted(PROMPTS)
        cold = first.answer(PROMPTS)
        again = first.answer(PROMPTS)
        first.flush()
        first.forget_device()
        loaded = first.answer(PROMPTS)
    with start(connector(store)) as second:
        restarted = second.answer(PROMPTS)
    for answers in (cold, again, loaded, restarted):
        assert [one.tokens for one in answers] == wanted
    assert [one.cached for one in cold] == [0, 0, 0, 0]
    for answers in (again, loaded, restarted):
        assert [one.cached for one in answers] == WHOLE


@pytest.mark.parametrize("start", ["v2-overlapping"], indirect=True)
def test_orders_of_the_memory_share_a_store(start, store):
    """By vLLM's names: layers (L), blocks (B), heads (H), tokens (N); the outermost first."""
    for number, layout in enumerate(("LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")):
        with start(connector(store), layout=layout) as made:
            made.check(PROMPTS, made.wanted(PROMPTS), WHOLE if number else [0, 0, 0, 0])


@pytest.mark.parametrize("start", ["v2-overlapping"], indirect=True)
def test_fail_ends_the_request_and_nothing_else(start):
    transfer = connector("faulty://fail", KV_LOAD_FAILURE_POLICY="fail")
    with start(transfer) as made:
        store = faulty_store.STORES["fail"]
        wanted = made.wanted(PROMPTS)
        assert made.tokens(PROMPTS) == wanted
        made.flush()
        made.forget_device()
        store._operations = frozenset({"load"})
        store.set("flip")
        assert {one.reason for one in made.answer(PROMPTS)[:3]} == {"error"}
        made.check_empty()
        store.heal()
        made.forget_device()
        assert made.tokens(PROMPTS) == wanted


@two_modes
@pytest.mark.parametrize("windows", [(None, 40, 40), (40, 40, 40), (STATE, None, STATE)])
def test_several_groups_are_loaded_whole_or_not_at_all(start, windows):
    with start(connector("faulty://windows"), windows=windows) as made:
        store = faulty_store.STORES["windows"]
        wanted = made.wanted(PROMPTS)
        assert made.tokens(PROMPTS) == wanted
        made.flush()
        made.forget_device()
        made.check(PROMPTS, wanted, WHOLE)
        store._operations = frozenset({"load"})
        for fault in ("swap", "raise", "lie", "late"):
            made.forget_device()
            store.set(fault)
            assert made.tokens(PROMPTS) == wanted
            store.heal()
            made.check_empty()
        longer = [prompt + answer for prompt, answer in zip(PROMPTS, wanted, strict=True)]
        made.forget_device()
        assert made.tokens(longer, 70) == made.wanted(longer, 70)


@two_modes
@pytest.mark.parametrize(
    ("save_on", "windows", "blocks"),
    [
        ("full", (None, None, None), 28),
        ("finish", (None, None, None), 28),
        ("full", (STATE, None, STATE), 40),
    ],
)
def test_preempted_requests_answer_the_same(start, store, save_on, windows, blocks):
    prompts = prompts_of(6 * SIZE, 6 * SIZE + 5, 6 * SIZE + 9, 5 * SIZE)
    length = 5 * SIZE
    transfer = connector(store, save_on=save_on)
    few = {"num_gpu_blocks_override": blocks, "max_model_len": 400}
    with start(transfer, windows=windows, **few) as made:
        scheduler, preempted = made.scheduler, []
        preempt = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *args, **more: (
            preempted.append(request.request_id),
            preempt(request, *args, **more),
        )
        wanted = made.wanted(prompts, length)
        assert made.tokens(prompts, length) == wanted
        assert preempted
        made.check_empty()
        made.flush()
        made.forget_device()
        again = made.answer(prompts, length)
    assert [one.tokens for one in again] == wanted
    assert all(one.cached for one in again)


@pytest.mark.parametrize("start", ["v2-overlapping"], indirect=True)
def test_prefill_and_decode_over_a_shared_store(start, store):
    with start(connector(store, KV_ROLE="kv_producer")) as prefill:
        prefill.answer(PROMPTS, 1)
        told = [one.kv_transfer_params for one in prefill.outputs]
    assert told == [{"kvconnect_num_tokens": n} for n in WHOLE]
    with start(connector(store, KV_ROLE="kv_consumer")) as decode:
        for prompt, params, cached in zip(PROMPTS, told, WHOLE, strict=True):
            [answer] = decode.answer([prompt], params=params)
            assert ([answer.tokens], answer.cached) == (decode.wanted([prompt]), cached)


@pytest.mark.parametrize(
    ("policy", "windows"),
    [
        ("fcfs", (None, 40, 40)),
        ("priority", (None, None, None)),
        ("fcfs", (STATE, 40, None, STATE)),
    ],
)
def test_requests_aborts_preemptions_faults_and_resets_in_any_order(start, policy, windows):
    """In few blocks, and on a store that is never well for long."""
    rng = random.Random(f"{policy} {windows}")
    common = prompts_of(12 * SIZE)[0]
    faults = [one for one in BACKEND_FAULTS if one != "none"]
    with start(
        connector("faulty://soak", **LIMITS | {"load_timeout_s": 0.3}),
        windows=windows,
        num_gpu_blocks_override=48,
        max_model_len=288,
        max_num_batched_tokens=80,
        max_num_seqs=6,
        scheduling_policy=policy,
    ) as made:
        made.poison_what_fails()
        store = faulty_store.STORES["soak"]
        found: dict[str, list[int]] = {}
        wanted: dict[str, list[int]] = {}
        aborted: set[str] = set()
        for number in range(150):
            if len(wanted) - len(found) - len(aborted) < 8:
                prompt = common[: rng.randrange(1, 12 * SIZE)]
                prompt = prompt + prompts_of(rng.randrange(1, 40), seed=rng.randrange(9))[0]
                length = rng.choice((1, 3, 2 * SIZE))
                more = {"priority": rng.randrange(3)} if policy == "priority" else {}
                [name] = made.submit([prompt], length, **more)
                [wanted[name]] = made.wanted([prompt], length)
            made.step(found)
            if number % 12 == 0:
                store.set(rng.choice([*faults, "none", "none"]))
            if rng.random() < 0.08:
                left = [one for one in wanted if one not in found and one not in aborted]
                if left:
                    aborted.add(victim := rng.choice(left))
                    made.llm.llm_engine.abort_request([victim])
            if rng.random() < 0.05:
                # False while blocks are in use; the connector's part may still be done.
                made.llm.reset_prefix_cache(reset_connector=rng.random() < 0.5)
        store.heal()
        until = time.monotonic() + 60
        while made.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < until
            made.step(found)
        for name, tokens in wanted.items():
            if name not in aborted:
                assert found[name] == tokens, name
        assert len(found) > 10
