"""Another model, dtype, revision or block size on one directory never meets the wrong blocks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from harness import answer, disk_url

from kvconnect.engine.checkpoint.random_model import make_model


@pytest.fixture
def store(master_store: Path, tmp_path: Path) -> Path:
    """A copy of the filled store."""
    directory = tmp_path / "copy"
    shutil.copytree(master_store, directory)
    return directory


def test_other_weights_of_the_same_shape(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    make_model(other, "llama", seed=4, max_position_embeddings=8192)
    output = answer(other, disk_url(store))
    assert output.reused_store_tokens == 0
    assert output.output_token_ids == answer(other).output_token_ids


def test_other_weights_under_the_same_path_and_time(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model, path)
    store = disk_url(tmp_path / "store")
    first = answer(path, store)
    weights = path / "model.safetensors"
    stat = weights.stat()
    make_model(tmp_path / "other", "llama", seed=4, max_position_embeddings=8192)
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.stat().st_size == stat.st_size
    second = answer(path, store)
    assert second.reused_store_tokens == 0
    assert second.output_token_ids == answer(path).output_token_ids
    assert second.output_token_ids != first.output_token_ids


def test_another_revision_of_the_configuration(model: Path, store: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model, path)
    config = json.loads((path / "config.json").read_text())
    config["rms_norm_eps"] = 0.01
    (path / "config.json").write_text(json.dumps(config))
    output = answer(path, disk_url(store))
    assert output.reused_store_tokens == 0
    assert output.output_token_ids == answer(path).output_token_ids


def test_the_same_model_elsewhere_hits(model: Path, store: Path, tmp_path: Path) -> None:
    path = tmp_path / "moved"
    shutil.copytree(model, path)
    assert answer(path, disk_url(store)).computed_tokens == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype(model: Path, store: Path, dtype: str) -> None:
    output = answer(model, disk_url(store), dtype=dtype)
    assert output.reused_store_tokens == 0
    assert output.output_token_ids == answer(model, dtype=dtype).output_token_ids


@pytest.mark.parametrize("tokens_per_block", [8, 32])
def test_another_block_size(
    model: Path, store: Path, expected: list[int], tokens_per_block: int
) -> None:
    output = answer(model, disk_url(store), tokens_per_block=tokens_per_block)
    assert output.reused_store_tokens == 0
    assert list(output.output_token_ids) == expected
