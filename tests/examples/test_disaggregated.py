"""``examples/disaggregated*.py``: every prompt is transferred, and answered as by one engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = "disaggregated_serving"
FEW = ("--tokens", "90", "--prompts")


def output_of(script: Path, model: Path, prompts: int) -> list[str]:
    more = ("--model", model, *FEW, str(prompts))
    done = subprocess.run(
        [sys.executable, script, *more], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(240)  # several processes, each of which imports everything
def test_two_engines_transfer_every_prompt(repository_root, model):
    _, *lines = output_of(repository_root / "examples/disaggregated.py", model, 1)
    rows = [line.split() for line in lines]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("without", "90", "89", "yes"),
        ("with", "90", "89", "yes"),
    ]


def test_servers_transfer_every_prompt_and_end_clean(forked, example, model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{EXAMPLE}.py", "--model", str(model), *FEW, "2"])
    example.main()
    check(capsys.readouterr().out.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_commands_transfer_every_prompt_and_end_clean(repository_root, model):
    check(output_of(repository_root / f"examples/{EXAMPLE}.py", model, 2))


def check(lines: list[str]) -> None:
    rows = [line.split() for line in lines if line.endswith(" yes")]
    assert [row[0] for row in rows] == ["without", "with"] * 2
    assert all(int(transferred) == int(tokens) - 1 for _, tokens, transferred, *_ in rows)
    assert any("every answer is that of one server" in line for line in lines)
