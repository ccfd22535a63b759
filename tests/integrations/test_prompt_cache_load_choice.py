"""`PromptCache` computes a prompt if its load would take longer, by the model's own passes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from load_clock import Decisions, LoadClock
from prompts import T, answer, generate, opened, prompt
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvconnect.integrations.transformers import PromptCache, hooks
from kvconnect.integrations.transformers.hooks import PassTimes

SIZE = 5 * T + 3
LOADED = SIZE - 1
FAST, SLOW = 1e-9, 1.0
"""Seconds of the store for a token; a pass takes what it really does."""


@pytest.fixture(scope="module")
def model(model_of) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_of("llama"), dtype=torch.float64)


@pytest.fixture
def prompts(model: PreTrainedModel, clock: LoadClock) -> Iterator[PromptCache]:
    """It has computed five prompts, which are in the store."""
    with opened(model, "memory:?capacity=64MiB", load_decisions=True) as made:
        clock.set_in(made._choice)
        load_all = made._store.load_all
        made._store.load_all = clock.times(load_all, lambda orders: sum(map(len, orders)) * T)
        for number in range(5):
            ask(model, made, number)
        assert made.flush()
        yield made


def ask(model: PreTrainedModel, prompts: PromptCache, *seeds: int) -> tuple[int, ...]:
    """Tokens of prompts that were loaded."""
    ids = torch.cat([prompt(SIZE, seed) for seed in seeds])
    answered, loaded = answer(model, prompts, ids, max_new_tokens=3)
    assert answered == generate(model, ids, max_new_tokens=3)
    return loaded


def test_a_slow_store_is_not_asked_once_it_is_measured(model, prompts, clock):
    clock.token_s = SLOW
    seen = Decisions()
    loaded = [ask(model, prompts, one) for one in range(4)]
    assert loaded == [(LOADED,), (0,), (0,), (0,)]
    assert ask(model, prompts, 1, 2) == (0, 0)  # nor for two rows
    assert seen() == {"load": 1, "compute": 4}


def test_a_fast_store_is_asked(model, prompts, clock):
    clock.token_s = FAST
    seen = Decisions()
    assert [ask(model, prompts, one) for one in range(4)] == [(LOADED,)] * 4
    assert ask(model, prompts, 1, 2) == (LOADED, LOADED)
    assert seen() == {"load": 5}


def test_without_decisions_a_slow_store_is_asked(model, clock):
    with opened(model, "memory:?capacity=64MiB") as prompts:
        clock.set_in(prompts._choice)
        ask(model, prompts, 0)
        ask(model, prompts, 1)
        assert prompts.flush()
        prompts._store.load_all = clock.times(prompts._store.load_all, lambda _: 1e6)
        assert [ask(model, prompts, one % 2) for one in range(4)] == [(LOADED,)] * 4


class DeviceEvent:
    """An event of a device that has come to the times below `reached`."""

    reached = 0.0

    def __init__(self, time_ms: float) -> None:
        self.time_ms = time_ms

    def query(self) -> bool:
        return self.time_ms <= self.reached

    def elapsed_time(self, other: DeviceEvent) -> float:
        assert other.query()
        return other.time_ms - self.time_ms


def test_passes_on_a_device_are_reported_once_it_is_done_with_them(monkeypatch):
    recorded: list[tuple[int, float, float]] = []
    choice = SimpleNamespace(record_step=lambda *step: recorded.append(step))
    marks = iter([0.0, 40.0, 50.0, 60.0, 60.0, 90.0, 95.0])
    monkeypatch.setattr(hooks.torch.cuda, "Event", DeviceEvent)
    times = PassTimes(choice, torch.device("cuda"))
    times._now = lambda: DeviceEvent(next(marks))
    caches = [StandInCache(length) for length in (0, 0, 100)]
    monkeypatch.setattr(DeviceEvent, "reached", 0.0)
    times.begin(caches[0], 2, 10)
    times.end(caches[0], succeeded=True)
    assert not recorded
    DeviceEvent.reached = 60.0
    times.begin(caches[1], 1, 5)
    times.end(caches[1], succeeded=True)
    assert recorded == [(20, 20 * 5.0, 0.04), (5, 5 * 2.5, 0.01)]
    times.begin(caches[2], 1, 1)
    DeviceEvent.reached = 100.0
    times.end(caches[2], succeeded=False)
    times.end(caches[2], succeeded=True)  # it was not begun
    assert len(recorded) == 2


class StandInCache:
    def __init__(self, length: int) -> None:
        self._length = length

    def get_seq_length(self) -> int:
        return self._length
