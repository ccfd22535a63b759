"""Fixtures of the server's tests: a model, and one server for all that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess, running

from kvconnect.engine.checkpoint.random_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with room for long answers."""
    directory = tmp_path_factory.mktemp("server") / "model"
    make_model(directory, "llama", seed=3, max_position_embeddings=4096)
    return directory


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of eight running and eight waiting completions that soon tires of its clients."""
    output = tmp_path_factory.mktemp("server") / "output"
    limits = ("--max-batch-size", "8", "--max-queue", "8", "--max-body", "1MiB")
    with running(
        model, output, *limits, "--client-timeout", "1.5", "--kv-cache-tokens", "32768"
    ) as one:
        yield one


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The official client of `server`."""
    with server.client() as one:
        yield one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the store and the output of a module's own server."""
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    """The URL of a store for a module's own server."""
    return f"disk:{folder}/kv?capacity=64MiB"
