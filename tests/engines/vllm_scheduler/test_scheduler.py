"""`KvConnect` under the engine core and the scheduler of a vLLM that has no kernels here.

Both halves of the connector are real, and so is the memory that they move; the forward pass is that
of `StandInWorker`, in which every element that is used counts. One engine for each way of making
steps, on a store whose faults are set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext

import faulty_store
import pytest
from cases import LIMITS, PROMPTS, WHOLE
from modes import MODES
from stand_in_engine import SIZE, StandInEngine
from vllm_engine import connector, prompts_of

from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS, FaultyBackend

pytestmark = pytest.mark.engines

LOADING = "WAITING_FOR_REMOTE_KVS"
OPERATIONS = frozenset({"lookup", "load", "save", "delete", "children"})


@pytest.fixture(scope="module", params=MODES)
def served(request, starter) -> Iterator[tuple[StandInEngine, FaultyBackend]]:
    """On a faulty store."""
    with starter(request.param)(connector("faulty://one", **LIMITS)) as made:
        made.poison_what_fails()
        yield made, faulty_store.STORES["one"]


@pytest.fixture
def healthy(served: tuple[StandInEngine, FaultyBackend]) -> tuple[StandInEngine, FaultyBackend]:
    """The same, once the store is used again after the fault before, and has `PROMPTS`."""
    made, store = served
    store.heal()
    store._operations = OPERATIONS
    pair = made.connector._scheduler._scheduler
    until = time.monotonic() + 60
    while not pair._finding.store.backend.available or pair._finding.budget.suspended:
        assert time.monotonic() < until
        time.sleep(0.02)
    made.forget_device()
    assert made.tokens(PROMPTS) == made.wanted(PROMPTS)
    made.flush()
    made.forget_device()
    return made, store


@pytest.mark.parametrize("fault", [one for one in BACKEND_FAULTS if one != "none"])
@pytest.mark.parametrize("operations", [OPERATIONS, frozenset({"load"})], ids=["all", "load"])
def test_no_fault_changes_a_token(healthy, fault, operations):
    made, store = healthy
    store._operations = operations
    hits = store.hits
    store.set(fault)
    until = time.monotonic() + 60
    while store.hits == hits:  # calls of the fault before, which end now, may open the breaker
        assert time.monotonic() < until
        made.forget_device()
        assert made.tokens(PROMPTS) == made.wanted(PROMPTS)
        made.check_empty()


def test_a_wrong_element_would_be_noticed(healthy):
    """The check of the checks: KV that is not loaded changes what is answered."""
    made, _ = healthy
    copier = made.worker._worker._worker._access.copiers[0]
    kept, copier.copy_in = copier.copy_in, lambda *_, **__: None
    try:
        answers = made.tokens(PROMPTS[:1])
    finally:
        copier.copy_in = kept
    assert answers != made.wanted(PROMPTS[:1])


def test_a_prompt_of_whole_blocks_leaves_a_token_to_compute(healthy):
    """Behind a load in the background that token is computed again; a block alone is not loaded."""
    made, _ = healthy
    prompts = prompts_of(4 * SIZE, SIZE, seed=5)
    wanted = made.wanted(prompts)
    assert made.tokens(prompts) == wanted
    made.flush()
    made.forget_device()
    made.check(prompts, wanted, [4 * SIZE, 0])


def test_what_the_device_has_is_not_loaded_and_what_follows_is(healthy):
    made, _ = healthy
    made.answer([PROMPTS[0][: 5 * SIZE + 3]])
    [answer] = made.answer(PROMPTS[:1])
    assert ([answer.tokens], answer.cached) == (made.wanted(PROMPTS[:1]), WHOLE[0])


@pytest.mark.parametrize("fault", ["hang", "late"])
def test_an_abort_during_a_load_gives_the_blocks_back(healthy, fault):
    made, store = healthy
    half = made.connector._scheduler
    store._operations = frozenset({"load"})
    store.delay_s = 0.5
    store.set(fault)
    names = made.submit(PROMPTS, 4)
    until = time.monotonic() + 60
    while not any(one.loading for one in half._tracked.values()):
        assert time.monotonic() < until
        made.step({})
    made.llm.llm_engine.abort_request(names)
    made.check_empty()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 7])
def test_reset_while_requests_run(healthy, num_steps):
    made, _ = healthy
    names = made.submit(PROMPTS, 40)
    found: dict[str, list[int]] = {}
    until = time.monotonic() + 60
    while not any(one.num_computed_tokens for one in made.scheduler.running):
        assert time.monotonic() < until
        made.step(found)
    for _ in range(num_steps):
        made.step(found)
    while any(one.status.name == LOADING for one in made.scheduler.requests.values()):
        assert time.monotonic() < until
        made.step(found)  # vLLM itself refuses to reset behind a load
    # vLLM itself cannot while a step is under way, whose blocks it frees later; what it has
    # preempted by then comes again.
    impossible = pytest.raises(RuntimeError, match="Failed to reset KV cache")
    with impossible if made.core.batch_queue else nullcontext():
        made.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert made.run(names, found=found) == made.wanted(PROMPTS, 40)
    made.check_empty()


def test_reset_of_the_connector_keeps_what_was_saved(healthy):
    made, _ = healthy
    assert made.llm.reset_prefix_cache(reset_connector=True)
    made.check(PROMPTS, made.wanted(PROMPTS), WHOLE)


def test_behind_new_weights_nothing_is_found_until_a_reset_names_them(healthy):
    made, _ = healthy
    made.core.model_executor.collective_rpc("update_config", args=({},))
    for _ in range(2):
        made.forget_device()
        assert [one.cached for one in made.answer(PROMPTS)] == [0, 0, 0, 0]
        made.flush()
    assert made.llm.reset_prefix_cache(reset_connector=True)
    after = made.answer(PROMPTS)
    made.flush()
    made.forget_device()
    again = made.answer(PROMPTS)
    assert [one.tokens for one in again] == made.wanted(PROMPTS)
    assert [one.cached for one in after] == [0, 0, 0, 0]
    assert [one.cached for one in again] == WHOLE
