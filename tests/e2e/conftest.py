"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import answer, disk_url

from kvconnect.engine.checkpoint.random_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama whose answer depends on every byte of its KV."""
    directory = tmp_path_factory.mktemp("e2e") / "model"
    make_model(directory, "llama", seed=3, max_position_embeddings=8192)
    return directory


@pytest.fixture(scope="session")
def expected(model: Path) -> list[int]:
    """The answer to `PROMPT` without any store."""
    return list(answer(model).output_token_ids)


@pytest.fixture(scope="session")
def master_store(
    model: Path, expected: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A store directory that holds the blocks of `PROMPT` and its answer. Not to be changed."""
    directory = tmp_path_factory.mktemp("master") / "store"
    assert list(answer(model, disk_url(directory)).output_token_ids) == expected
    return directory
