"""What the tests of the command line share."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

from kvconnect.engine.checkpoint.random_model import make_model


@pytest.fixture(autouse=True, scope="session")
def no_foreign_progress_bars() -> Iterator[None]:
    """What `main` asks of transformers comes too late here: it is imported already."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A small random Llama."""
    return make_model(tmp_path_factory.mktemp("cli") / "model", "llama")


@pytest.fixture
def answer(kvconnect, model: Path):
    """Runs ``generate --json`` with more arguments and returns the objects it prints."""

    def run(*arguments: object) -> list[dict]:
        common = ("--json", "--dtype", "float64", "--max-tokens", 6, "--ignore-eos")
        code, out, err = kvconnect("generate", model, *common, *arguments)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return run


@pytest.fixture
def bench(kvconnect):
    """Runs a benchmark; returns its figures by name, and what it said besides."""

    def run(*arguments: object) -> tuple[dict[str, dict[str, Any]], str]:
        code, out, err = kvconnect("bench", *arguments, "--json")
        assert code == 0, err
        return {figure["name"]: figure for figure in json.loads(out)["figures"]}, err

    return run


@pytest.fixture
def elsewhere():
    """Runs coroutines on a loop in another thread, as a running engine does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def closed_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a store."""
    return tmp_path / "kv"


@pytest.fixture
def url(directory: Path) -> str:
    """The URL of a store with room for what tests fill in."""
    return f"disk:{directory}?capacity=64MiB"
