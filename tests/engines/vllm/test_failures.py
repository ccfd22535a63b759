"""A store that is damaged, dead, slow or lying costs time: never a token, never the engine."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import faulty_store
import torch
from vllm_engine import Engine, connector, engine, prompts_of

from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS, FaultyBackend

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(400, 200, 90)
LIMITS = {"lookup_timeout_ms": 200.0, "load_timeout_s": 1.0, "save_timeout_s": 1.0}


@pytest.fixture(scope="module", params=[True, False], ids=["overlapping steps", "one step"])
def served(request, make_vllm_model) -> Iterator[tuple[Engine, FaultyBackend]]:
    """On a faulty store; loads are in the step that computes where steps do not overlap."""
    faulty_store.install()
    with engine(
        make_vllm_model(),
        connector("faulty://one", **LIMITS),
        async_scheduling=request.param,
    ) as made:
        yield made, faulty_store.STORES["one"]


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
def test_no_fault_changes_a_token(served, fault):
    made, store = served
    store.heal()
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
def test_blocks_that_fail_to_load_are_computed(served, fault):
    made, store = served
    store.heal()
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


def test_fail_ends_the_request_and_nothing_else(llama):
    faulty_store.install()
    transfer = connector("faulty://fail", KV_LOAD_FAILURE_POLICY="fail", **LIMITS)
    with engine(llama, transfer) as made:
        store = faulty_store.STORES["fail"]
        wanted = made.tokens(PROMPTS)
        made.flush()
        made.forget_device()
        store.set("flip")
        reasons = [one.reason for one in made.answer(PROMPTS)]
        assert "error" in reasons
        store.heal()
        assert made.tokens(PROMPTS) == wanted


def damaged(directory: Path) -> None:
    """Some bytes of every file of blocks are wrong."""
    rng = random.Random(1)
    for path in segments(directory):
        content = bytearray(path.read_bytes())
        for _ in range(200):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


def truncated(directory: Path) -> None:
    """Every file of blocks ends early."""
    for path in segments(directory):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 3)


def segments(directory: Path) -> list[Path]:
    found = [path for path in directory.rglob("*") if path.is_file() and "index" not in path.name]
    return [path for path in found if path.stat().st_size > 1 << 20]


@pytest.mark.parametrize("harm", [damaged, truncated])
def test_a_store_that_was_harmed_while_nothing_ran(llama, tmp_path, harm):
    url = f"disk://{tmp_path}/store?capacity=64MiB"
    with engine(llama, connector(url)) as made:
        wanted = made.tokens(PROMPTS)
    assert segments(tmp_path / "store")
    harm(tmp_path / "store")
    with engine(llama, connector(url)) as made:
        assert made.tokens(PROMPTS) == wanted
        made.forget_device()
        assert made.tokens(PROMPTS) == wanted


def test_a_directory_that_goes_while_the_engine_runs(llama, tmp_path):
    with engine(llama, connector(f"disk://{tmp_path}/store?capacity=64MiB")) as made:
        wanted = made.tokens(PROMPTS)
        made.flush()
        shutil.rmtree(tmp_path / "store")
        for _ in range(2):
            made.forget_device()
            assert made.tokens(PROMPTS) == wanted
        made.check_empty()


def test_poison_would_be_noticed(served):
    """The check of the checks: KV that is not loaded changes what is answered."""
    made, store = served
    store.heal()
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
