"""``examples/persistent_prompt_cache.py``: two processes, the same tokens, or it fails."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

EXAMPLE = "persistent_prompt_cache"


@pytest.fixture
def here(example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in this process, with an engine each time, in place of new ones."""

    def answer(model: Path, prompt: Path, store: str, max_tokens: int):
        return example.answer(model, prompt.read_text(), store, max_tokens)

    monkeypatch.setattr(example, "answer_in_new_process", answer)


def test_two_engines_share_a_prompt(here, example, model, tmp_path, monkeypatch, capsys):
    share_a_prompt(example, model, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_two_processes_share_a_prompt(example, model, tmp_path, monkeypatch, capsys):
    share_a_prompt(example, model, tmp_path, monkeypatch, capsys)


def share_a_prompt(example, model, tmp_path, monkeypatch, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("A text that is worth keeping. " * 10)
    store = f"disk://{tmp_path}/kv?capacity=9MiB"
    arguments = ("--model", model, "--prompt", prompt, "--store", store)
    monkeypatch.setattr(sys, "argv", ["persistent_prompt_cache.py", *map(str, arguments)])
    example.main()
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["prompt", "tokens", "300", "300"] in lines
    assert ["reused", "from", "the", "store", "0", "299"] in lines
    assert ["computed", "300", "1"] in lines
    assert "speed-up of the first token" in out
    assert "cache on disk" in out
    assert "Both answered with the same 32 tokens." in out


def test_a_users_mistake_is_a_sentence(example, model: Path, tmp_path: Path, monkeypatch, capfd):
    common = ["persistent_prompt_cache.py", "--model", str(model), "--prompt"]
    monkeypatch.setattr(sys, "argv", [*common, str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        example.main()
    assert "nowhere' is not a file" in capfd.readouterr().err
    (tmp_path / "prompt").write_text("x")
    monkeypatch.setattr(sys, "argv", [*common, str(tmp_path / "prompt"), "--store=dsk:x", "--once"])
    with pytest.raises(SystemExit, match="error: store scheme 'dsk' is unknown; did you mean"):
        example.main()


@pytest.fixture
def run(example):
    return example.Run(300, 299, 1, 5.0, [1, 2, 3])


def test_it_fails_when_nothing_was_reused_or_the_answers_differ(
    example, model: Path, run, monkeypatch, capsys
):
    cold = dataclasses.replace(run, reused_store_tokens=0)
    assert example.verdict(model, "text", run, cold) == "the second process reused nothing"
    other = dataclasses.replace(run, output_token_ids=[1, 2, 4])
    assert example.verdict(model, "text", run, other) == "the answers differ"
    monkeypatch.setattr(example, "near_tie", lambda *_: 1e-6)
    assert example.verdict(model, "text", run, other) is None
    assert "part at a near-tie" in capsys.readouterr().out


def test_the_gap_is_that_of_the_models_two_best(example, model: Path, run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model).encode("text")
    reference = AutoModelForCausalLM.from_pretrained(model)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*tokens, 7]])).logits[0, -1]
    best, next_best, third = logits.topk(3).indices.tolist()
    expected = (logits[best] - logits[next_best]) / logits.abs().max()
    assert example.near_tie(model, "text", [7, best], [7, next_best]) == pytest.approx(
        float(expected), rel=1e-3
    )
    assert example.near_tie(model, "text", [7, best], [7, third]) is None
