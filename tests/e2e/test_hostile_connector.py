"""Connectors that fail, lie and hang: no token is wrong, no caller waits, no block is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import hostile_connector
import pytest
from harness import open_llm
from hostile_connector import Mind, Planted
from test_random_workload import _prompts

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.errors import ConnectorContractError, EngineClosed

LONG_FORM = 150  # seeds

Wanted = list[tuple[list[int], SamplingParams, tuple[int, ...]]]


@pytest.fixture
def mind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mind]:
    fresh = Mind()
    monkeypatch.setattr(hostile_connector, "mind", fresh)
    return fresh


@pytest.fixture(scope="module")
def wanted(model: Path) -> Wanted:
    """Prompts, and the answers to them without any connector."""
    dice = random.Random(5)
    prompts = _prompts(dice)
    params = [SamplingParams(max_tokens=dice.randrange(1, 20), ignore_eos=True) for _ in prompts]
    with open_llm(model, max_tokens=8192) as llm:
        outputs = llm.generate(prompts, params)
    answers = [output.output_token_ids for output in outputs]
    return list(zip(prompts, params, answers, strict=True))


def small_engine(model: Path, dice: random.Random) -> LLM:
    return LLM(
        model,
        # The longest request takes 19 blocks, less than half.
        kv_cache=KvCacheConfig(
            tokens_per_block=8,
            max_tokens=dice.choice([400, 600]),
            enable_partial_reuse=dice.random() < 0.7,
            copy_on_partial_reuse=dice.random() < 0.7,
        ),
        connector=KvCacheConnectorConfig(
            connector_module="hostile_connector",
            connector_scheduler_class="HostileScheduler",
            connector_worker_class="HostileWorker",
            load_timeout_s=dice.choice([0.05, 0.3]),
            save_timeout_s=dice.choice([0.05, 0.3]),
            max_quarantined_fraction=dice.choice([0.1, 0.5]),
        ),
        dtype="float64",
        max_num_tokens=dice.choice([16, 64, 2048]),
        max_batch_size=dice.choice([2, 8, 64]),
        scheduling=dice.choice(["guaranteed_no_evict", "max_utilization"]),
    )


def run(llm: LLM, wanted: Wanted, dice: random.Random, *, lawful: bool) -> int:
    """Submit all of it in some order, abort some, and check what comes; how many were answered."""
    answered = 0
    handles = []
    for prompt, params, answer in dice.sample(wanted, len(wanted)):
        try:
            handles.append((llm.submit(prompt, params), answer))
        except EngineClosed:
            assert not lawful
    for handle, _ in dice.sample(handles, len(handles) // 6):
        handle.abort()
    for handle, answer in handles:
        try:
            output = handle.result(60)
        except (Planted, ConnectorContractError, EngineClosed, TypeError):
            assert not lawful
            continue
        whole = output.finish_reason != "abort"
        tokens = output.output_token_ids
        assert tokens == (answer if whole else answer[: len(tokens)])
        answered += whole
    return answered


def nothing_is_left(llm: LLM) -> None:
    """Whatever was outstanding is returned, and then every block is free."""
    deadline = time.monotonic() + 60
    while llm.stats().free_blocks < llm.stats().max_blocks or llm.stats().saving_requests:
        assert time.monotonic() < deadline, llm.stats()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    llm._engine._kv.blocks.check_invariants()
    assert not llm._engine._connector._records


def survive(model: Path, wanted: Wanted, mind: Mind, seed: int, lawless: float) -> None:
    mind.dice = dice = random.Random(seed)
    for rate in (0.0, lawless, 0.0):  # the first one fills the store
        mind.lawless, mind.kind = rate, False
        with small_engine(model, dice) as llm:
            answered = run(llm, wanted, dice, lawful=rate == 0)
            assert rate or answered
            if not rate:
                mind.kind = True
                nothing_is_left(llm)
    assert mind.stored
    assert not mind.violations


def test_within_its_contract(model: Path, wanted: Wanted, mind: Mind) -> None:
    survive(model, wanted, mind, 0, 0.0)


@pytest.mark.parametrize(("seed", "lawless"), [(0, 0.002), (1, 0.05)])
def test_outside_of_it(model: Path, wanted: Wanted, mind: Mind, seed: int, lawless: float) -> None:
    survive(model, wanted, mind, seed, lawless)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + LONG_FORM))
def test_the_long_form(model: Path, wanted: Wanted, mind: Mind, seed: int) -> None:
    survive(model, wanted, mind, seed, random.Random(seed).choice([0.0, 0.002, 0.01, 0.05]))
