"""`KvConnectTier` under vLLM's own offloading, in whole engines."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import faulty_store
import numpy as np
import pytest
from pydantic import ValidationError
from tiers import BLOCK, WHOLE, prompt_of, tier

from kvconnect.errors import ConfigurationError
from kvconnect.trace import metrics

SLOW_S = 1.0


def counted(name: str) -> float:
    return metrics.snapshot().get(name, 0.0)


def hold(store: Any, fault: str) -> None:
    """Have the store of the running engine do `fault`, from its own thread."""
    faulty_store.STORES[""].delay_s = SLOW_S
    store.io.loop.call_soon_threadsafe(faulty_store.STORES[""].set, fault)


def test_a_prompt_is_answered_alike_cold_from_the_device_the_host_and_the_store(
    engine, prompt, tmp_path, monkeypatch
):
    monkeypatch.setattr(metrics, "engine", "kvconnect")
    first = engine(tier(tmp_path))
    assert metrics.engine == "vllm"
    [cold] = first.answer(prompt)
    assert first.cached == [0]
    [device] = first.answer(prompt)
    assert first.cached == [WHOLE]
    assert first.llm.reset_prefix_cache()
    [host] = first.answer(prompt)
    assert first.cached == [WHOLE]
    first.settle()

    restarted = engine(tier(tmp_path))
    [stored] = restarted.answer(prompt)
    assert restarted.cached == [WHOLE]
    restarted.settle()
    assert cold == device == host == stored


def test_an_engine_that_turns_without_a_pause_leaves_the_store_time_to_answer(engine, tmp_path):
    """In the client's process it does; the store's threads then hardly ran, and were too late."""
    long = prompt_of(4000, seed=5)
    first = engine(tier(tmp_path))
    cold = first.answer(long)
    first.settle()
    first.close()
    restarted = engine(tier(tmp_path))
    assert restarted.answer(long) == cold
    assert restarted.cached == [4000 // BLOCK * BLOCK]
    restarted.settle()


def test_a_longer_prompt_is_loaded_as_far_as_it_is_known(engine, prompt, cold, tmp_path):
    restarted = engine(tier(tmp_path))
    longer = prompt + prompt_of(200, seed=2)
    [warm] = restarted.answer(longer)
    assert restarted.cached == [WHOLE]
    restarted.settle()
    [plain] = engine(tier(tmp_path / "other")).answer(longer)
    assert warm == plain


def test_damaged_blocks_are_computed_and_stored_anew(engine, prompt, cold, tmp_path):
    flipped = random.Random(3)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20:
            data = bytearray(file.read_bytes())
            for at in range(64 << 10, len(data), 4096):
                data[at + flipped.randrange(4096)] ^= 0x10
            file.write_bytes(data)
    before = counted("store.bad_frame")
    damaged = engine(tier(tmp_path))
    assert damaged.answer(prompt) == [cold]
    assert counted("store.bad_frame") > before
    damaged.settle()
    damaged.forget_device()
    assert damaged.answer(prompt) == [cold]
    assert damaged.cached == [WHOLE]
    damaged.settle()


def test_a_store_that_fails_costs_time_and_nothing_else(engine, prompt, cold, tmp_path):
    failing = engine(tier(tmp_path, "faulty"))
    for number, fault in enumerate(
        ("raise", "lie", "deny", "miscount", "truncate", "flip", "swap")
    ):
        hits = faulty_store.STORES[""].hits
        hold(failing.tier._access.store, fault)
        assert failing.answer(prompt) == [cold]
        assert faulty_store.STORES[""].hits > hits
        others = [prompt_of(300, 10 * number + seed) for seed in range(4)]
        alone = failing.answer(*others)
        failing.settle()
        hold(failing.tier._access.store, "none")
        until = time.monotonic() + 60
        while not failing.tier._access.store.backend.available:
            assert time.monotonic() < until
            time.sleep(0.02)
        failing.forget_device()
        assert failing.answer(*others) == alone
        assert failing.answer(prompt) == [cold]
        failing.settle()
        failing.forget_device()


def test_a_frozen_store_holds_up_no_request_and_not_the_end(engine, prompt, cold, tmp_path):
    limits = {"lookup_timeout_ms": 100, "load_timeout_s": 2, "save_timeout_s": 2}
    frozen = engine(tier(tmp_path, "faulty", **limits))
    hold(frozen.tier._access.store, "hang")
    start = time.monotonic()
    assert frozen.answer(prompt) == [cold]
    assert frozen.cached == [0]
    assert time.monotonic() - start < 60
    start = time.monotonic()
    frozen.close()
    assert time.monotonic() - start < 60


def test_a_store_that_freezes_while_it_loads_fails_the_load_in_time(engine, prompt, cold, tmp_path):
    limits = {"load_timeout_s": 2, "save_timeout_s": 2}
    frozen = engine(tier(tmp_path, "faulty", **limits))
    faulty_store.STORES[""]._operations = frozenset({"load"})
    hold(frozen.tier._access.store, "hang")
    start = time.monotonic()
    assert frozen.answer(prompt) == [cold]
    assert time.monotonic() - start < 60
    assert frozen.cached == [0]
    frozen.settle()


def test_no_call_waits_for_a_slow_store(engine, prompt, cold, tmp_path):
    slow = engine(tier(tmp_path, "faulty", lookup_timeout_ms=60_000))
    longest = timed(slow.tier)
    hold(slow.tier._access.store, "late")
    assert slow.answer(prompt) == [cold]
    assert slow.cached == [WHOLE]
    slow.settle()
    # Every call to the store took a second; those to the tier are microseconds, and what a busy
    # machine adds.
    assert longest() < SLOW_S / 2


def timed(tier: Any) -> Callable[[], float]:
    """From now on the time of each call that vLLM makes in its steps is taken."""
    spent = [0.0]

    def wrap(name: str) -> None:
        original = getattr(tier, name)

        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                spent.append(time.perf_counter() - start)

        setattr(tier, name, call)

    for name in (
        *("lookup", "on_new_request", "on_request_finished", "on_schedule_end"),
        *("submit_load", "submit_store", "get_finished_jobs"),
    ):
        wrap(name)
    return lambda: max(spent)


def test_one_bad_block_ends_the_load_and_what_came_before_it_counts(
    engine, prompt, cold, tmp_path, monkeypatch
):
    partial = engine(tier(tmp_path))
    results = []
    finished = partial.tier.get_finished_jobs
    monkeypatch.setattr(
        partial.tier, "get_finished_jobs", lambda: results.extend(got := finished()) or got
    )
    store = partial.tier._access.store.backend
    load = store.load
    monkeypatch.setattr(store, "load", lambda keys, into: load(keys[:2], into[:2]))
    assert partial.answer(prompt) == [cold]
    [failed] = [one for one in results if one.successful_keys]
    assert not failed.success
    assert 0 < len(failed.successful_keys) < 18
    assert partial.cached == [len(failed.successful_keys) * BLOCK]
    partial.settle()


def test_salts_and_namespaces_are_apart(engine, prompt, tmp_path):
    first = engine(tier(tmp_path))
    first.answer(prompt, cache_salt="a")
    first.settle()
    first.close()
    second = engine(tier(tmp_path))
    second.answer(prompt, cache_salt="b")
    assert second.cached == [0]
    second.answer(prompt)
    assert second.cached == [0]
    second.forget_device()
    second.answer(prompt, cache_salt="a")
    assert second.cached == [WHOLE]
    second.settle()
    second.close()
    third = engine(tier(tmp_path, namespace="mine"))
    third.answer(prompt, cache_salt="a")
    assert third.cached == [0]


def test_many_requests_at_once_with_aborts_leave_nothing_behind(engine, tmp_path):
    from vllm import SamplingParams

    busy = engine(tier(tmp_path), host_nbytes=8 << 20)
    llm_engine = busy.llm.llm_engine
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    chance = random.Random(4)
    ended = 0
    for round_number in range(2):
        for number in range(32):
            asked = {"prompt_token_ids": prompt_of(300, seed=number % 12)}
            llm_engine.add_request(f"{round_number}-{number}", asked, params)
        while llm_engine.has_unfinished_requests():
            ended += sum(output.finished for output in llm_engine.step())
            if chance.random() < 0.2:
                victim = f"{round_number}-{chance.randrange(32)}"
                llm_engine.abort_request([victim])
    assert ended > 20
    busy.settle()
    busy.forget_device()
    alone = busy.answer(prompt_of(300, seed=1))
    busy.settle()
    busy.close()
    assert engine(tier(tmp_path / "other")).answer(prompt_of(300, seed=1)) == alone


def test_a_typo_is_found_while_vllm_is_configured(engine, tmp_path):
    with pytest.raises(ValidationError, match=r"1 validation error for VllmConfig\n.*'capacity'"):
        engine({**tier(tmp_path), "capacity": "1GiB"})


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({"capacity": "1GiB"}, {"connector_from": None}, "unknown field 'capacity'"),
        ({"staging_bytes": 100}, {}, "staging_bytes=100"),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo=xxhash"),
    ],
)
def test_a_wrong_configuration_says_so_at_start_up(engine, tmp_path, settings, arguments, said):
    with pytest.raises(ConfigurationError) as refused:
        engine({**tier(tmp_path), **settings}, **arguments)
    assert said in str(refused.value)


def test_a_chunk_that_the_host_memory_does_not_have_fails_its_job(engine, prompt, tmp_path):
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    made = engine(tier(tmp_path))
    [wanted] = made.answer(prompt)
    made.settle()
    rows = made.tier._num_rows
    for number, submit in enumerate((made.tier.submit_store, made.tier.submit_load)):
        keys = [bytes([number]) * 32 + bytes(4)]
        job = TransferJob(10**6 + number, keys, np.array([rows]), bool(number), ReqContext("none"))
        submit(job)
        [result] = made.tier.get_finished_jobs()
        assert (result.job_id, result.success) == (job.job_id, False)
    made.forget_device()
    assert made.answer(prompt) == [wanted]
    assert made.cached == [WHOLE]
    made.settle()
