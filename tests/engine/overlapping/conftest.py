"""An engine beside a late store, with a model of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache as once
from pathlib import Path

import pytest
from beside import ALL, PROMPTS, Beside, Late, cache, connector
from late_store import LateStore

from kvconnect import LLM, SamplingParams


@pytest.fixture(params=ALL)
def model(request, model_of, mixed, tiny) -> Path:
    match request.param:
        case "mixed":
            return mixed
        case "llama" | "mistral" | "deepseek_v3" | "gpt_neox":
            return model_of(request.param)
        case "deepseek_v32" | "hy_v4":
            return tiny(request.param, index_topk=8)
        case "phimoe":
            return tiny(request.param, sliding_window=5)
        case _:
            return tiny(request.param)


@pytest.fixture(scope="session")
def saved_by() -> Callable[[Path], LateStore]:
    """Makes the store that has every prompt of PROMPTS, the tail of each and its states."""

    @once
    def save(model: Path) -> LateStore:
        store = LateStore()
        with LLM(model, kv_cache=cache(), dtype="float64", connector=connector(store)) as llm:
            for prompt in PROMPTS:
                llm.generate(prompt, SamplingParams(max_tokens=1))
        return store

    return save


@pytest.fixture
def late_by_default(model, saved_by, open_llm, reference) -> Iterator[Late]:
    """Engines that decide by themselves what is computed beside loads."""
    late = Late(model, saved_by(model), open_llm, reference)
    yield late
    late.store.release()


@pytest.fixture
def late(late_by_default, monkeypatch) -> Late:
    """Engines that compute beside loads what a test says."""
    late_by_default.beside = Beside(monkeypatch)
    return late_by_default
