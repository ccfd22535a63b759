"""`KvConnectTier` under vLLM's own offloading, in whole engines."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_disk
import numpy as np
import pytest
from prompts import prompt_of
from pydantic import ValidationError
from tiers import BLOCK, WHOLE, tier

from kvconnect.backends import registry
from kvconnect.errors import ConfigurationError
from kvconnect.trace import metrics

SLOW_S = 1.0


@pytest.fixture
def faulty(monkeypatch) -> None:
    """The scheme ``faulty:`` is known."""
    monkeypatch.setitem(registry._BUILT_IN, "faulty", "faulty_disk:from_url")


def saved_blocks(directory: Path, prompt: list[int], engine) -> list[int]:
    """What a first engine answers to `prompt`, which then is in the store of `directory`."""
    first = engine(tier(directory))
    [answer] = first.answer(prompt)
    first.settle()
    first.close()
    return answer


def counted(name: str) -> float:
    return metrics.snapshot().get(name, 0.0)


def hold(store: Any, fault: str) -> None:
    """Have the store of the running engine do `fault`, from its own thread."""
    faulty_disk.stores[-1].delay_s = SLOW_S
    store.io.loop.call_soon_threadsafe(faulty_disk.stores[-1].set, fault)


def test_a_prompt_is_answered_alike_cold_from_the_device_the_host_and_the_store(
    engine, prompt, tmp_path
):
    first = engine(tier(tmp_path))
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


def test_metrics_of_the_process_carry_the_engine_s_name(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "engine", "kvconnect")
    engine(tier(tmp_path))
    assert metrics.engine == "vllm"


def test_an_engine_that_turns_without_a_pause_leaves_the_store_time_to_answer(engine, tmp_path):
    """In the client's process it does; the store's threads then hardly ran, and were too late."""
    long = prompt_of(4000, seed=5)
    cold = saved_blocks(tmp_path, long, engine)
    restarted = engine(tier(tmp_path))
    assert restarted.answer(long) == [cold]
    assert restarted.cached == [4000 // BLOCK * BLOCK]
    restarted.settle()


def test_a_longer_prompt_is_loaded_as_far_as_it_is_known(engine, prompt, tmp_path):
    saved_blocks(tmp_path, prompt, engine)
    longer = prompt + prompt_of(200, seed=2)
    [cold] = engine(tier(tmp_path / "other")).answer(longer)
    restarted = engine(tier(tmp_path))
    [warm] = restarted.answer(longer)
    assert restarted.cached == [WHOLE]
    assert warm == cold
    restarted.settle()


def test_damaged_blocks_are_computed_and_stored_anew(engine, prompt, tmp_path):
    cold = saved_blocks(tmp_path, prompt, engine)
    flipped = random.Random(3)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20:
            data = bytearray(file.read_bytes())
            for at in range(64 << 10, len(data), 4096):
                data[at + flipped.randrange(4096)] ^= 0x10
            file.write_bytes(data)
    before = counted("store.bad_frame")
    damaged = engine(tier(tmp_path))
    [answer] = damaged.answer(prompt)
    assert answer == cold
    assert counted("store.bad_frame") > before
    damaged.settle()
    damaged.close()
    healed = engine(tier(tmp_path))
    [answer] = healed.answer(prompt)
    assert answer == cold
    assert healed.cached == [WHOLE]


@pytest.mark.parametrize("fault", ["raise", "lie", "deny", "miscount", "truncate", "flip", "swap"])
def test_a_store_that_fails_costs_time_and_nothing_else(engine, prompt, tmp_path, faulty, fault):
    cold = saved_blocks(tmp_path, prompt, engine)
    failing = engine(tier(tmp_path, "faulty"))
    hold(failing.tier._access.store, fault)
    assert failing.answer(prompt) == [cold]
    assert faulty_disk.stores[-1].hits > 0
    others = [prompt_of(300, seed) for seed in range(4)]
    alone = failing.answer(*others)
    failing.settle()
    hold(failing.tier._access.store, "none")
    failing.forget_device()
    assert failing.answer(*others) == alone
    assert failing.answer(prompt) == [cold]
    failing.settle()


def test_a_frozen_store_holds_up_no_request_and_not_the_end(engine, prompt, tmp_path, faulty):
    cold = saved_blocks(tmp_path, prompt, engine)
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


def test_a_store_that_freezes_while_it_loads_fails_the_load_in_time(
    engine, prompt, tmp_path, faulty
):
    cold = saved_blocks(tmp_path, prompt, engine)
    limits = {"load_timeout_s": 2, "save_timeout_s": 2}
    frozen = engine(tier(tmp_path, "faulty", **limits))
    faulty_disk.stores[-1]._operations = frozenset({"load"})
    hold(frozen.tier._access.store, "hang")
    start = time.monotonic()
    assert frozen.answer(prompt) == [cold]
    assert time.monotonic() - start < 60
    assert frozen.cached == [0]
    frozen.settle()


def test_no_call_waits_for_a_slow_store(engine, prompt, tmp_path, faulty):
    cold = saved_blocks(tmp_path, prompt, engine)
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
    engine, prompt, tmp_path, monkeypatch
):
    cold = saved_blocks(tmp_path, prompt, engine)
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


def test_a_store_keeps_to_its_capacity_and_the_last_prompts(engine, tmp_path):
    prompts = [prompt_of(600, seed) for seed in range(20, 32)]
    first = engine(tier(tmp_path, capacity="4MiB"))
    answers = [first.answer(prompt)[0] for prompt in prompts]
    first.settle()
    first.close()
    nbytes = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert nbytes <= 4 << 20
    restarted = engine(tier(tmp_path, capacity="4MiB"))
    assert restarted.answer(prompts[-1]) == answers[-1:]
    assert restarted.cached == [WHOLE]
    assert restarted.answer(prompts[0]) == answers[:1]
    assert restarted.cached == [0]


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


def test_another_model_in_the_same_directory_finds_nothing(engine, long_llama, prompt, tmp_path):
    from kvconnect.engine.checkpoint.random_model import make_model

    saved_blocks(tmp_path / "store", prompt, engine)
    other = tmp_path / "model"
    shutil.copytree(long_llama, other)
    size = {"num_layers": 3, "hidden_size": 128, "max_position_embeddings": 8192}
    make_model(other, "llama", seed=5, **size)
    second = engine(tier(tmp_path / "store"), model=str(other))
    second.answer(prompt)
    assert second.cached == [0]


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": ""}, r"KvConnectTier\.url: is missing"),
        ({"url": "dsik:///x"}, "store scheme 'dsik' is unknown"),
        ({"capacity": "1GiB"}, "unknown field 'capacity'"),
        ({"codec": "fp8"}, r"KvConnectTier\.codec: fp8 rounds numbers"),
        ({"lookup_timeout_ms": 0}, "lookup_timeout_ms=0"),
        ({"locality": "NEAR"}, "locality='NEAR'"),
    ],
)
def test_a_typo_is_found_while_vllm_is_configured(engine, tmp_path, settings, said):
    with pytest.raises(ValidationError, match=f"1 validation error for VllmConfig\n.*{said}"):
        engine({**tier(tmp_path), **settings})


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({"capacity": "1GiB"}, {"connector_from": None}, "unknown field 'capacity'"),
        ({"staging_bytes": 100}, {}, "staging_bytes=100"),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo=xxhash"),
        ({}, {"load_format": "dummy"}, "load_format=dummy"),
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
