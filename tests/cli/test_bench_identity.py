"""``kvconnect bench identity``: what it refuses, measures and leaves out."""

from __future__ import annotations

import sys

import pytest

from kvconnect.bench.report import Figure
from kvconnect_bench.blocks.party import PartyFailed
from kvconnect_bench.engines import run as engines
from kvconnect_bench.identity import run

STEP_S = 0.01
LOOK_S = 50e-6


class EngineHere:
    """Stands in for vLLM's process: with the watch steps are slower, and each fourth one looks."""

    def __init__(self, *_: object) -> None:
        self.looks = LOOK_S

    def ask(self, workload: str, **what):
        return getattr(self, workload, lambda **_: None)(**what)

    def start(self, connector: str, **_: object) -> None:
        if connector == "KvConnectTier":
            raise PartyFailed("no offloading here")

    def watch(self, *, watches: bool) -> None:
        self.looks = LOOK_S if watches else 0.0

    def answer(self, prompt: list[int], max_tokens: int) -> dict:
        step_s = STEP_S + 20 * self.looks
        looks = ((number % 4 == 0) * self.looks for number in range(max_tokens))
        return {"steps": [(step_s, 0.0, 0.0, look) for look in looks]}

    def close(self) -> None:
        """No process."""

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        """No process."""


@pytest.fixture
def identity(llama, bench):
    """Runs some parts; returns their figures, and what was printed meanwhile."""

    def measured(parts: str, *options: str) -> tuple[dict[str, dict], str]:
        small = ("--model", llama, "--repeats", 1, "--prompt-tokens", 20)
        return bench("identity", "--parts", parts, *small, *options)

    return measured


def test_names_and_the_canary_stand_beside_loading_and_a_step(identity):
    found, _ = identity("weights,canary")
    targets = {name: one["target"] for name, one in found.items() if one["target"]}
    assert targets == {
        "content hash / loading": "<= 0.1",
        "name / loading": "<= 0.1",
        "per prefill / decode step": "<= 1.5",
    }
    assert all(one["value"] > 0 for one in found.values())


def test_the_wire_is_that_of_bench_transfer_with_checksums(identity, monkeypatch):
    asked = []

    def bench_transfer(_, __, plan, ___) -> list[Figure]:
        asked.append(plan)
        return [Figure("loopback: tcp / tcp without checksums", 0.9, "x", ">= 0.85")]

    monkeypatch.setattr(run, "bench_transfer", bench_transfer)
    assert "loopback: tcp / tcp without checksums" in identity("wire")[0]
    (plan,) = asked
    assert (plan.parts, plan.transports) == (("loopback", "link"), ("tcp",))
    assert (plan.rates_gbit, plan.rounds) == ((1.0, 8.0), 1)


def test_steps_of_vllm_are_compared_with_and_without_the_watch(identity, monkeypatch):
    monkeypatch.setattr(engines, "Party", EngineHere)
    found, err = identity("vllm", "--peer-python", sys.executable)
    values = {
        name.removeprefix("vLLM with KvConnect: "): one["value"] for name, one in found.items()
    }
    assert values == pytest.approx(
        {
            "decode step": 11,
            "decode step, watched / not": 1.1,
            "decode step, not watched twice": 1,
            "one look at the weights": 50,
            "looks, share of all steps": 100 * LOOK_S / 4 / 0.011,
        }
    )
    assert "vllm: KvConnectTier is left out: no offloading here" in err


def test_a_watch_that_never_looks_is_no_result(identity, monkeypatch):
    monkeypatch.setattr(engines, "Party", EngineHere)
    monkeypatch.setattr(EngineHere, "watch", lambda *_, **__: None)
    monkeypatch.setattr(EngineHere, "answer", lambda *_, **__: {"steps": [(0.01, 0, 0, 0)] * 30})
    with pytest.raises(RuntimeError, match="the weights were never looked at"):
        identity("vllm", "--peer-python", sys.executable)


def test_without_an_interpreter_that_has_vllm_its_part_is_left_out_by_name(identity):
    found, err = identity("canary,vllm")
    assert "vllm is left out: give --peer-python" in err
    assert not any(name.startswith("vLLM") for name in found)
