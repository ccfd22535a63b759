"""``kvconnect make-model``: a random model from its arguments alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvconnect.engine.checkpoint.random_model import ARCHITECTURES


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_equal_seeds_write_equal_weights(kvconnect, tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        code, _, err = kvconnect("make-model", tmp_path / name, "--seed", seed)
        assert code == 0, err
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_sizes_and_architecture_are_what_was_asked_for(kvconnect, tmp_path: Path):
    sizes = ("--hidden-size", 32, "--layers", 3, "--num-heads", 2, "--num-kv-heads", 1)
    code, out, err = kvconnect("make-model", tmp_path / "m", "--arch", "qwen3", *sizes)
    assert code == 0, err
    assert "qwen3" in out
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert (config["hidden_size"], config["num_hidden_layers"]) == (32, 3)


def test_a_model_is_not_overwritten_unless_told_to(kvconnect, tmp_path: Path):
    kvconnect("make-model", tmp_path / "m")
    before = weights(tmp_path / "m")
    code, _, err = kvconnect("make-model", tmp_path / "m", "--seed", 9)
    assert code == 2
    assert "holds a model already" in err
    assert weights(tmp_path / "m") == before
    code, _, _ = kvconnect("make-model", tmp_path / "m", "--seed", 9, "--force")
    assert code == 0
    assert weights(tmp_path / "m") != before


def test_the_architectures_are_listed(kvconnect):
    code, out, _ = kvconnect("make-model", "--list-archs")
    assert code == 0
    assert out.split() == list(ARCHITECTURES)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--arch", "lama"], "did you mean 'llama'"),
        (["--preset", "dmo"], "did you mean 'demo'"),
        (["--layers", "0"], "num_layers: 0 must be at least 1"),
        (["--hidden-size", "50"], "hidden_size=50 must be a multiple"),
        (["--dtype", "float23"], "dtype: 'float23' is unknown"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    kvconnect, tmp_path: Path, arguments, complaint
):
    code, _, err = kvconnect("make-model", tmp_path / "m", *arguments)
    assert code == 2
    (line,) = err.splitlines()
    assert complaint in line
    assert not (tmp_path / "m").exists()
