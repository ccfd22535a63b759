"""``examples/serve.py``: a chat goes on with another server, or it fails."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvconnect.engine.checkpoint.random_model import make_model

EXAMPLE = "serve"


def test_a_chat_survives_a_restart(forked, example, tmp_path: Path, monkeypatch, capsys):
    converse(example, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_a_chat_survives_a_restart_of_the_command(example, tmp_path, monkeypatch, capsys):
    converse(example, tmp_path, monkeypatch, capsys)


def converse(example, tmp_path, monkeypatch, capsys):
    model = make_model(tmp_path / "model", "llama", max_position_embeddings=2048)
    subject = tmp_path / "subject.txt"
    subject.write_text("A subject that is worth talking about. " * 10)
    store = f"disk://{tmp_path}/kv?capacity=64MiB"
    arguments = ("--model", model, "--subject", subject, "--store", store, "--turns", 2)
    monkeypatch.setattr(sys, "argv", ["serve.py", *map(str, arguments)])
    example.main()
    out = capsys.readouterr().out
    first, second = re.findall(r"([\d,]+) prompt tokens, +([\d,]+) of them cached", out)
    assert first[1] == "0"
    assert int(second[1]) >= int(first[0]) // 32 * 32
    assert f"The second server found {second[1]} of {second[0]} tokens" in out


def test_it_fails_when_nothing_was_found(example, tmp_path: Path, monkeypatch):
    turns = [[example.Turn(400, 0, 5.0)], [example.Turn(500, 0, 5.0)]]
    monkeypatch.setattr(example, "chat", lambda *_: turns)
    arguments = ["serve.py", "--model", str(tmp_path), "--store", "memory:"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="the second one found 0"):
        example.main()
