"""``examples/custom_backend.py`` runs; ``tests/testing`` has the contract of its backend."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLE = "custom_backend"


def test_the_example_runs_and_the_second_engine_finds_the_blocks(
    example, model: Path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["custom_backend.py", str(model)])
    example.main()
    first, second = capsys.readouterr().out.splitlines()
    assert "352 prompt tokens, 0 from the folder, 352 computed" in first
    assert "352 prompt tokens, 351 from the folder, 1 computed" in second
