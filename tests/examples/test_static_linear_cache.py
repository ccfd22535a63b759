"""``examples/static_linear_cache.py`` runs and generates what `generate()` does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

EXAMPLE = "static_linear_cache"


def test_the_example_runs_and_says_the_same_as_generate(example, model: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["static_linear_cache.py", str(model), "--tokens", "12"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(example.PROMPTS)
    assert all(line.endswith("as generate()") for line in lines)


def test_a_wrong_place_in_the_cache_is_seen(example, model: Path, monkeypatch, capsys):
    right = example.kv_cache_update
    monkeypatch.setattr(
        example,
        "kv_cache_update",
        lambda cache, new, places: right(cache, new, (places - 1).clamp(min=0)),
    )
    monkeypatch.setattr(sys, "argv", ["static_linear_cache.py", str(model), "--tokens", "12"])
    with pytest.raises(SystemExit):
        example.main()
    assert "but generate() says" in capsys.readouterr().out


def test_sequences_do_not_depend_on_each_other(example, model: Path):
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    together = example.generate(loaded, example.PROMPTS, 8, compiled=False)
    for prompt, tokens in zip(example.PROMPTS, together, strict=True):
        assert example.generate(loaded, [prompt], 8, compiled=False) == [tokens]
