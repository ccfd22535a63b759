"""No fault of a store, of all that the kit can plant, changes a token or ends the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import faulty_store
import torch
from vllm_engine import Engine, connector, engine, prompts_of

from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS, FaultyBackend

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(400, 200, 90)
LIMITS = {"lookup_timeout_ms": 200.0, "load_timeout_s": 1.0, "save_timeout_s": 1.0}


@pytest.fixture(scope="module", params=["background", "one-step"])
def served(request, make_vllm_model) -> Iterator[tuple[Engine, FaultyBackend]]:
    """On a faulty store; with loads in the background, or in the step that computes."""
    faulty_store.install()
    with engine(make_vllm_model(), connector(f"faulty://{request.param}", **LIMITS)) as made:
        yield made, faulty_store.STORES[request.param]


@pytest.fixture
def healthy(served: tuple[Engine, FaultyBackend]) -> tuple[Engine, FaultyBackend]:
    """The same, once the store is used again after the fault before."""
    made, store = served
    store.heal()
    pair = made.connector._scheduler._scheduler
    until = time.monotonic() + 20
    while not pair._store.backend.available or pair._budget.suspended:
        assert time.monotonic() < until
        time.sleep(0.02)
    made.forget_device()
    return made, store


def caches(made: Engine) -> list[torch.Tensor]:
    return made.core.model_executor.driver_worker.worker.model_runner.kv_caches


def poison(made: Engine) -> None:
    """Fill blocks that no request holds: what is not loaded is not what is computed with.

    With numbers that are none only where a load failed: vLLM's kernel multiplies slots of a block
    that are not written yet by zero.
    """
    for cache in caches(made):
        cache.fill_(777.0)
    half = made.worker._worker
    take = type(half).take_invalid_blocks

    def take_and_poison() -> set[int]:
        invalid = take(half)
        for cache in caches(made):
            cache[sorted(invalid)] = float("nan")
        return invalid

    half.take_invalid_blocks = take_and_poison


@pytest.mark.parametrize("fault", [one for one in BACKEND_FAULTS if one != "none"])
def test_no_fault_changes_a_token(healthy, fault):
    made, store = healthy
    wanted = made.tokens(PROMPTS)
    made.flush()
    made.forget_device()
    poison(made)
    store.set(fault)
    hits = store.hits
    assert made.tokens(PROMPTS) == wanted
    assert store.hits > hits
    made.check_empty()
    store.heal()
    made.forget_device()
    assert made.tokens(PROMPTS) == wanted
    made.check_empty()


@pytest.mark.parametrize("fault", ["flip", "truncate", "raise", "lie", "hang"])
def test_blocks_that_fail_to_load_are_computed(healthy, fault):
    made, store = healthy
    wanted = made.tokens(PROMPTS)
    made.flush()
    made.forget_device()
    poison(made)
    store._operations = frozenset({"load"})
    store.set(fault)
    try:
        assert made.tokens(PROMPTS) == wanted
    finally:
        store._operations = frozenset({"lookup", "load", "save", "delete", "children"})
        store.heal()
    made.check_empty()


def test_poison_would_be_noticed(healthy):
    """The check of the checks: KV that is not loaded changes what is answered."""
    made, _ = healthy
    wanted = made.tokens(PROMPTS[:1])
    made.flush()
    made.forget_device()
    half = made.worker._worker
    half._worker._route.copiers[0].copy_in, kept = (
        lambda *_, **__: None,
        (half._worker._route.copiers[0].copy_in),
    )
    poison(made)
    try:
        answers = made.tokens(PROMPTS[:1])
    finally:
        half._worker._route.copiers[0].copy_in = kept
        made.forget_device()
    assert answers != wanted
