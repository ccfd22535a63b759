"""Prefill and decode in two processes with their pools on one device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "disaggregated.py"
NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NO NIXL: not run")


@pytest.mark.timeout(170)
@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=NIXL)])
def test_every_prompt_is_transferred_and_answered_as_by_one_engine(device, transport, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, str(EXAMPLE), "--transport", transport, "--prompts", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
