"""``examples/disaggregated_serving.py``: it transfers every prompt, or it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow  # four processes that import everything
def test_it_transfers_every_prompt_and_ends_clean(repository_root, model):
    script = repository_root / "examples/disaggregated_serving.py"
    done = subprocess.run(
        [sys.executable, script, "--model", model, "--tokens", "90", "--prompts", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith(" yes")]
    assert [row[0] for row in rows] == ["without", "with"] * 2
    assert all(int(transferred) == int(tokens) - 1 for _, tokens, transferred, *_ in rows)
    assert "every answer is that of one server" in done.stdout
