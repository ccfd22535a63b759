"""What computes differs while its names stay: never a hit, and hits where it does not differ."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
from vllm_engine import connector, engine, prompts_of

# Several engines, one after the other.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PROMPTS = prompts_of(100, 70)
NOTHING = [0, 0]
LOADED = [96, 64]


def cached(answers) -> list[int]:
    return [one.cached for one in answers]


def tokens(answers) -> list[list[int]]:
    return [one.tokens for one in answers]


@pytest.fixture(scope="module")
def wanted(make_vllm_model):
    """What two models answer, without any store."""
    found = []
    for seed in (0, 1):
        with engine(make_vllm_model(seed=seed), None) as plain:
            found.append(plain.tokens(PROMPTS))
    assert found[0] != found[1]
    return found


@pytest.mark.planted("weights-reloaded", "vllm", "refused")
@pytest.mark.planted("paused", "vllm", "hit")
def test_weights_that_are_read_anew_from_another_directory(start, make_vllm_model, store, wanted):
    old, new = make_vllm_model(), make_vllm_model(seed=1)
    with start(old, connector(store)) as made:
        assert made.tokens(PROMPTS) == wanted[0]
        made.flush()
        # A pause that clears caches, and sleep.
        made.llm.sleep(level=1)
        made.llm.wake_up()
        loaded = made.answer(PROMPTS)
        assert (tokens(loaded), cached(loaded)) == (wanted[0], LOADED)
        made.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        made.forget_device()
        for _ in range(2):
            answers = made.answer(PROMPTS)
            assert (tokens(answers), cached(answers)) == (wanted[1], NOTHING)
            made.flush()
            made.forget_device()
        assert made.llm.reset_prefix_cache(reset_connector=True)
        for expected in (NOTHING, LOADED):
            answers = made.answer(PROMPTS)
            assert (tokens(answers), cached(answers)) == (wanted[1], expected)
            made.flush()
            made.forget_device()
    with engine(old, connector(store)) as fresh:
        answers = fresh.answer(PROMPTS)
        assert (tokens(answers), cached(answers)) == (wanted[0], LOADED)
    with engine(new, connector(store)) as other:
        answers = other.answer(PROMPTS)
        assert (tokens(answers), cached(answers)) == (wanted[1], NOTHING)


@pytest.mark.planted("weights-updated", "vllm", "refused")
@pytest.mark.planted("uncounted-write", "vllm", "refused")
def test_weights_that_are_written_to_in_the_worker(start, llama, store, wanted):
    with start(llama, connector(store)) as made:
        assert made.tokens(PROMPTS) == wanted[0]
        made.flush()
        made.inside(inside.scale, 2.0)
        made.forget_device()
        changed = made.answer(PROMPTS)
        assert tokens(changed) != wanted[0]
        made.flush()
        made.forget_device()
        again = made.answer(PROMPTS)
        assert (tokens(again), cached(again)) == (tokens(changed), NOTHING)
        assert made.llm.reset_prefix_cache(reset_connector=True)
        for expected in (NOTHING, LOADED):
            answers = made.answer(PROMPTS)
            assert (tokens(answers), cached(answers)) == (tokens(changed), expected)
            made.flush()
            made.forget_device()
    with engine(llama, connector(store)) as fresh:
        answers = fresh.answer(PROMPTS)
        assert (tokens(answers), cached(answers)) == (wanted[0], LOADED)
