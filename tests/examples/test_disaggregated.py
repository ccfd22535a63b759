"""``examples/disaggregated.py``: both ways transfer the whole prompt, and answer as one engine."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow  # three processes that import everything
def test_it_transfers_every_prompt(repository_root, model):
    script = repository_root / "examples/disaggregated.py"
    done = subprocess.run(
        [sys.executable, script, "--model", model, "--tokens", "90", "--prompts", "1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("without", "90", "89", "yes"),
        ("with", "90", "89", "yes"),
    ]
