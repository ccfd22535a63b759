"""No fault of a store, of all that the kit can plant, changes a token or ends the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
from vllm_engine import Engine, connector, engine, prompts_of

from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(400, 200, 90)
LIMITS = {"lookup_timeout_ms": 200.0, "load_timeout_s": 1.0, "save_timeout_s": 1.0}


@pytest.fixture(scope="module")
def served(make_vllm_model, tmp_path_factory) -> Iterator[tuple[Engine, str]]:
    """On a faulty store, with the core in a process of its own."""
    transfer = connector(f"faulty://one{tmp_path_factory.mktemp('store')}", **LIMITS)
    with engine(make_vllm_model(), transfer, core_process=True) as made:
        yield made, "one"


@pytest.fixture
def healthy(served: tuple[Engine, str]) -> tuple[Engine, str]:
    """The same, once the store is used again after the fault before."""
    made, store = served
    made.inside(inside.heal, store)
    until = time.monotonic() + 60
    while not all(made.inside(inside.uses_store)):
        assert time.monotonic() < until
        time.sleep(0.02)
    made.forget_device()
    return made, store


@pytest.mark.parametrize("fault", [one for one in BACKEND_FAULTS if one != "none"])
def test_no_fault_changes_a_token(healthy, fault):
    made, store = healthy
    wanted = made.tokens(PROMPTS)
    made.flush()
    made.forget_device()
    made.inside(inside.poison)
    hits = sum(made.inside(inside.num_hits, store))
    made.inside(inside.plant, store, fault)
    assert made.tokens(PROMPTS) == wanted
    assert sum(made.inside(inside.num_hits, store)) > hits
    made.check_empty()
    made.inside(inside.heal, store)
    made.forget_device()
    assert made.tokens(PROMPTS) == wanted
    made.check_empty()


def test_poison_would_be_noticed(healthy):
    """The check of the checks: KV that is not loaded changes what is answered."""
    made, store = healthy
    wanted = made.tokens(PROMPTS[:1])
    made.flush()
    made.inside(inside.lose_loads, True)
    try:
        for _ in range(10):  # a lookup that takes too long on a busy machine is a miss
            made.forget_device()
            made.inside(inside.poison)
            hits = sum(made.inside(inside.num_hits, store))
            answers = made.tokens(PROMPTS[:1])
            if sum(made.inside(inside.num_hits, store)) > hits and answers != wanted:
                break
    finally:
        made.inside(inside.lose_loads, False)
        made.forget_device()
    assert answers != wanted
