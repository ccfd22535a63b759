"""A real vLLM does not load from a store that is slower than its model, and answers the same."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from load_clock import Decisions
from slow_store import BUCKETS
from vllm_engine import connector, engine, prompts_of

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(*[1500] * 6)
WARM = prompts_of(*[1500] * 3, seed=2)


def test_a_store_at_an_eighth_of_the_models_rate_is_asked_once_and_again_when_it_is_fast(llama):
    settings = {"load_decisions": True, "load_timeout_s": 600.0}
    with engine(llama, connector("bucket://slow", **settings)) as made:
        wanted = [made.tokens([one]) for one in PROMPTS]
        began = time.perf_counter()
        for one in WARM:
            made.tokens([one], 1)
        computed_s = (time.perf_counter() - began) / len(WARM)
        made.flush()
        made.forget_device()
        store = BUCKETS["slow"]
        nbytes = store.saved / (len(PROMPTS) + len(WARM))
        store.bytes_per_s = nbytes / computed_s / 8
        seen = Decisions()
        answers = [made.answer([one])[0] for one in PROMPTS]
        assert [[one.tokens] for one in answers] == wanted
        assert [one.cached > 0 for one in answers] == [True] + [False] * 5
        assert seen() == {"load": 1, "compute": 5}

        # The store becomes fast, and the hundredth load is started that is predicted to be slower.
        store.bytes_per_s = float("inf")
        made.forget_device()
        made.connector._scheduler._choice._loads._num_rejected = 99
        answers = [made.answer([one])[0] for one in PROMPTS]
        assert [[one.tokens] for one in answers] == wanted
        assert all(one.cached >= 1440 for one in answers)
        assert seen() == {"load": 6}


def test_a_fast_store_is_asked_for_every_prompt(llama):
    with engine(llama, connector("bucket://fast", load_decisions=True)) as made:
        wanted = [made.tokens([one]) for one in PROMPTS]
        made.flush()
        made.forget_device()
        seen = Decisions()
        answers = [made.answer([one])[0] for one in PROMPTS]
        assert [[one.tokens] for one in answers] == wanted
        assert all(one.cached >= 1440 for one in answers)
        assert seen() == {"load": 6}
