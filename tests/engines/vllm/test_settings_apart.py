"""Settings of vLLM that change what a model computes: what was saved without is not found with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from vllm_engine import SIZE, connector, engine, prompts_of

# Several engines, one after the other.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

PROMPTS = prompts_of(100, 70)
LOADED = [96, 64]


def answers(model: Path, store: str, **options: Any) -> tuple[list[list[int]], list[int]]:
    with engine(model, connector(store), **options) as made:
        found = made.answer(PROMPTS)
        made.flush()
    return [one.tokens for one in found], [one.cached for one in found]


def copy_with(model: Path, where: Path, **changed: Any) -> Path:
    """The model, with other settings in its ``config.json``."""
    shutil.copytree(model, where)
    settings = json.loads((where / "config.json").read_text(encoding="utf-8"))
    (where / "config.json").write_text(json.dumps(settings | changed), encoding="utf-8")
    return where


@pytest.mark.planted("overridden-configuration", "vllm", "key")
def test_a_configuration_that_comes_from_another_directory(llama, store, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 50.0}
    elsewhere = {"hf_config_path": str(copy_with(llama, tmp_path / "other", rope_parameters=rope))}
    usual, cached = answers(llama, store)
    assert cached == [0, 0]
    other, cached = answers(llama, store, **elsewhere)
    assert cached == [0, 0]
    assert other != usual
    assert answers(llama, store, **elsewhere) == (other, LOADED)


def test_the_long_factors_of_a_rope(llama, store, tmp_path):
    """VLLM turns all tokens by them if ``max_model_len`` is beyond the original length."""
    half = SIZE["hidden_size"] // SIZE["num_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * half,
        "long_factor": [float(2 + number) for number in range(half)],
        "original_max_position_embeddings": 256,
        "factor": 32.0,
    }
    model = copy_with(
        llama,
        tmp_path / "long",
        rope_parameters=rope,
        original_max_position_embeddings=256,
        max_position_embeddings=8192,
    )
    short, cached = answers(model, store, max_model_len=256)
    assert cached == [0, 0]
    long, cached = answers(model, store, max_model_len=1024)
    assert cached == [0, 0]
    assert long != short
    assert answers(model, store, max_model_len=2048) == (long, LOADED)
