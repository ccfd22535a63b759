"""What the tests of the examples share."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from server_process import running

from kvconnect.engine.checkpoint.random_model import make_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small random Llama."""
    return make_model(tmp_path_factory.mktemp("examples") / "model", "llama")


@pytest.fixture
def example(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The example that the test module names as ``EXAMPLE``, imported."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))  # examples import each other by name
    name: str = request.module.EXAMPLE
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def forked(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks the example's servers from a process that has imported everything."""
    numbers = itertools.count()

    @contextmanager
    def process(command: str, *arguments: str, crash: bool = False) -> Iterator[Callable[[], str]]:
        model, *options = arguments if command == "serve" else (None, *arguments)
        patient = ("--lookup-timeout", "60s") if "--store" in options else ()
        with running(model, tmp_path / f"output{next(numbers)}", *options, *patient) as one:
            yield lambda: f"{one.url}/v1"
            assert crash or one.stop() == 0

    monkeypatch.setattr(example, "process", process)
