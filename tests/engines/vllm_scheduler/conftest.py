"""vLLM's engine core around `StandInWorker`, in each way in which its steps are made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from modes import MODES

Start = Callable[..., AbstractContextManager[Any]]
"""Takes what `StandInEngine` does."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the configuration and weights of a model; only keys are made of it."""
    from kvconnect.engine.checkpoint.random_model import make_model

    directory = tmp_path_factory.mktemp("model") / "llama"
    return make_model(directory, "llama", num_layers=2, max_position_embeddings=2048)


@contextmanager
def started(mode: str, model: Path, transfer: dict[str, Any] | None, **options: Any):
    """An engine that is empty at its end."""
    from stand_in_engine import StandInEngine, vllm_on_any_machine

    with vllm_on_any_machine(mode):
        made = StandInEngine(model, transfer, **options)
        try:
            yield made
            made.check_empty()
        finally:
            made.close()


@pytest.fixture(scope="session")
def starter(model: Path) -> Callable[[str], Start]:
    """Of a mode, what starts engines in it; one at a time."""
    return lambda mode: lambda transfer, **options: started(mode, model, transfer, **options)


@pytest.fixture(params=MODES)
def start(request: pytest.FixtureRequest, starter: Callable[[str], Start]) -> Start:
    """Starts engines; one at a time."""
    return starter(request.param)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/store?capacity=64MiB"
