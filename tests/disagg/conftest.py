"""Fixtures of the tests of the transfer pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ANSWER, EngineProcess, Gate, open_engine

from kvconnect import LLM
from kvconnect.trace import Event, metrics


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def transport(request: pytest.FixtureRequest) -> str:
    """What blocks travel by."""
    return str(request.param)


@pytest.fixture
def open_one(llama: Path, transport: str) -> Iterator[Callable[..., LLM]]:
    """Opens engines of a role; closes them at the end."""
    opened: list[LLM] = []

    def open_it(role: str | None, model: Path = llama, **more: Any) -> LLM:
        more["transfer"] = {"transport": transport} | more.get("transfer", {})
        opened.append(open_engine(model, role, **more))
        return opened[-1]

    yield open_it
    for llm in opened:
        llm.close()


@pytest.fixture
def start_one(llama: Path, transport: str) -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines in processes of their own; kills them at the end."""
    started: list[EngineProcess] = []

    def start_it(role: str, model: Path = llama, **more: Any) -> EngineProcess:
        more["transfer"] = {"transport": transport} | more.get("transfer", {})
        if "tensor_parallel_size" in more:
            more["device"] = "cpu"
        started.append(EngineProcess(model, role, **more))
        return started[-1]

    yield start_it
    for process in started:
        process.end()


@pytest.fixture(scope="session")
def answer_of(model_of: Callable[[str], Path]) -> Iterator[Callable[..., list[int]]]:
    """What one engine without any connector answers."""
    engines: dict[str, LLM] = {}

    def answer(prompt: list[int], arch: str = "llama") -> list[int]:
        if arch not in engines:
            engines[arch] = open_engine(model_of(arch), None)
        return list(engines[arch].generate([prompt], ANSWER)[0].output_token_ids)

    yield answer
    for llm in engines.values():
        llm.close()


@pytest.fixture
def counted() -> Iterator[Counter[str]]:
    """What is counted during the test."""
    seen: Counter[str] = Counter()

    def hook(event: Event) -> None:
        seen[event.name] += 1
        for name, value in event.values.items():
            seen[f"{event.name}.{name}"] += int(value)

    remove = metrics.add_hook(hook)
    yield seen
    remove()


@pytest.fixture
def stop_at() -> Iterator[Callable[[int], Gate]]:
    """Stops prefill engines of this process at a layer."""
    gates: list[Gate] = []

    def stop(layer_calls: int) -> Gate:
        gates.append(Gate(layer_calls))
        return gates[-1]

    yield stop
    for gate in gates:
        gate.open()
