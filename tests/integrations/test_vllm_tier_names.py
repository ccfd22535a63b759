"""What a tier of vLLM's cannot see: weights that were replaced, and pictures' content."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvconnect.integrations.vllm.weights import WeightCalls
from kvconnect.integrations.vllm_tier.requests import NamedTokens
from kvconnect.integrations.vllm_tier.weights import TierWeights
from kvconnect.trace import metrics


class Executor:
    """VLLM's, with its only worker here, or with none of its own process."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.calls: list[object] = []
        self.model = model
        if model is not None:
            worker = SimpleNamespace(get_model=lambda: self.model)
            self.driver_worker = SimpleNamespace(worker=worker)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, **_):
        self.calls.append(method)
        return [method]


def harmless(_worker) -> None:
    """A function of a user's."""


# ---------------------------------------------------------------------- calls


def named(value: object) -> str:
    """The same in every process: a function's address is not."""
    return str(value).replace(str(harmless), "harmless")


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        (("reload_weights",), True),
        (("update_weights", None, (), {"update_info": {}}), True),
        (("start_weight_update",), True),
        (("load_model",), True),
        (("sleep", None, (), {"level": 1}), False),
        (("sleep", None, (), {"level": 2}), True),
        (("sleep", None, (2,)), True),
        (("sleep",), False),
        (("wake_up", None, (), {"tags": None}), False),
        (("execute_model", None, ("output",)), False),
        (("add_lora", None, ("lora",)), False),
        (("apply_model", None, (harmless,)), None),
        (("a_method_of_a_plug_in",), None),
        ((harmless,), None),
    ],
    ids=named,
)
@pytest.mark.parametrize("reports_unknown", [True, False])
def test_calls_that_change_weights_are_reported_before_they_are_made(
    call, changes, reports_unknown
):
    executor, reported = Executor(), []

    def changed(how: str) -> None:
        assert not executor.calls
        reported.append(how)

    calls = WeightCalls(executor, changed, reports_unknown=reports_unknown)
    assert executor.collective_rpc(*call) == [call[0]]
    assert bool(reported) == (reports_unknown if changes is None else changes)
    assert all(how.endswith("() was called") for how in reported)
    calls.close()
    executor.calls.clear()
    reported.clear()
    executor.collective_rpc("reload_weights")
    assert reported == []
    assert "collective_rpc" not in vars(executor) or executor.collective_rpc != calls._watched


def test_two_who_watch_one_executor_are_both_told_in_any_order_of_their_end():
    executor, first, second = Executor(), [], []
    one = WeightCalls(executor, first.append, reports_unknown=False)
    other = WeightCalls(executor, second.append, reports_unknown=False)
    executor.collective_rpc("reload_weights")
    one.close()
    executor.collective_rpc("reload_weights")
    other.close()
    executor.collective_rpc("reload_weights")
    assert (len(first), len(second), len(executor.calls)) == (1, 2, 3)


def test_other_calls_are_reported_before_they_are_made():
    executor, reported = Executor(), []

    def loads(*given: object) -> None:
        assert not executor.calls
        reported.append(given)

    others = {"add_lora": loads, "sleep": loads}
    calls = WeightCalls(executor, pytest.fail, reports_unknown=True, others=others)
    for how in ({"args": ("first",)}, {"timeout": None, "args": ("second",)}):
        executor.collective_rpc("add_lora", **how)
        executor.calls.clear()
    executor.collective_rpc("add_lora", None, ("third",))
    executor.calls.clear()
    executor.collective_rpc("sleep", kwargs={"level": 1})
    calls.close()
    executor.collective_rpc("add_lora", args=("fourth",))
    assert reported == [("first",), ("second",), ("third",), ()]


# ---------------------------------------------------------------------- weights


def weights_of(executor: Executor) -> tuple[TierWeights, list[str]]:
    names: list[str] = []
    return TierWeights(executor, names.append), names


def step(weights: TierWeights) -> bool:
    named = weights.are_named()
    weights.end_schedule()
    return named


@pytest.mark.planted("weights-updated", "vllm", "refused")
@pytest.mark.parametrize("function", ["update_weights", harmless, "apply_model"])
def test_where_no_weights_are_calls_stop_the_tier_until_a_reset(function):
    executor = Executor()
    weights, names = weights_of(executor)
    assert step(weights)
    executor.collective_rpc(function)
    assert not step(weights)
    weights.note_reset(device_is_empty=False)
    assert not step(weights)
    weights.note_reset(device_is_empty=True)
    assert step(weights)
    assert len(names) == 1
    weights.close()


@pytest.mark.planted("uncounted-write", "vllm", "refused")
def test_weights_that_are_here_are_watched():
    model = torch.nn.Linear(8, 8)
    weights, names = weights_of(Executor(model))
    assert step(weights)
    assert step(weights)
    model.weight.data.fill_(3.0)
    assert not weights.look()
    assert not step(weights)
    weights.note_reset(device_is_empty=True)
    assert step(weights)
    assert weights.look()
    assert len(names) == 1
    weights.close()


@pytest.mark.planted("paused", "vllm", "hit")
@pytest.mark.parametrize("model", [None, torch.nn.Linear(8, 8)])
def test_a_reset_without_new_weights_and_calls_that_leave_them_change_nothing(model):
    executor = Executor(model)
    weights, names = weights_of(executor)
    for method in ("execute_model", "sleep", "wake_up", "reset_mm_cache"):
        assert step(weights)
        executor.collective_rpc(method)
        weights.note_reset(device_is_empty=True)
    assert step(weights)
    assert names == []
    weights.close()


@pytest.mark.parametrize("model", [None, torch.nn.Linear(8, 8)])
def test_weights_that_change_behind_a_reset_have_a_name_at_once(model):
    executor = Executor(model)
    weights, names = weights_of(executor)
    assert step(weights)
    weights.note_reset(device_is_empty=True)
    for _ in range(2):
        executor.collective_rpc("update_weights")
        if model is not None:
            model.weight.data.add_(1.0)
    assert step(weights)
    assert step(weights)
    assert len(set(names)) == 2
    weights.close()


# ---------------------------------------------------------------------- pictures


def context_of(name: str, **ends: int) -> SimpleNamespace:
    places = {chunk.encode(): end for chunk, end in ends.items()}
    return SimpleNamespace(req_id=name, get_offload_key_position=places.get)


@pytest.mark.planted("picture-uuid", "vllm", "refused")
@pytest.mark.planted("picture-uuid-like-hash", "vllm", "refused")
def test_chunks_before_the_first_picture_alone_have_names():
    def picture(offset: int) -> SimpleNamespace:
        return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=20))

    requests = {
        "text": SimpleNamespace(mm_features=[], resumable=False),
        "picture": SimpleNamespace(mm_features=[picture(64), picture(200)], resumable=False),
        "stream": SimpleNamespace(mm_features=[], resumable=True),
    }
    named = NamedTokens(SimpleNamespace(requests=requests))
    before = metrics.snapshot().get("engine.request.uncached", 0)
    for name in (*requests, "unknown"):
        named.begin(name)
    assert metrics.snapshot()["engine.request.uncached"] == before + 3
    ends = {"a": 32, "b": 64, "c": 96}
    found = {
        name: [named.has(chunk.encode(), context_of(name, **ends)) for chunk in ends]
        for name in (*requests, "unknown")
    }
    assert found == {
        "text": [True] * 3,
        "picture": [True, True, False],
        "stream": [False] * 3,
        "unknown": [False] * 3,
    }
    assert not named.has(b"of no known place", context_of("picture"))
    for name in (*requests, "unknown"):
        named.end(name)
    assert not named._ends
