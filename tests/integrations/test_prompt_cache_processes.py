"""`PromptCache` across processes: a normal end that closes nothing, and ``kill -9``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from families import write_tiny

CHILD = Path(__file__).with_name("prompt_cache_child.py")

pytestmark = pytest.mark.slow


def run(model: Path, url: str, end: str) -> dict[str, object]:
    ended = subprocess.run(
        [sys.executable, str(CHILD), str(model), url, end],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == (-signal.SIGKILL if end == "kill" else 0), ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_next_process_loads_what_was_computed(model_of, tmp_path, end):
    model, url = model_of("llama"), f"disk://{tmp_path}/kv?capacity=64MiB"
    first = run(model, url, end)
    again = run(model, url, "exit")
    assert first["loaded"] == 0
    assert again == {"loaded": 399, "tokens": first["tokens"]}


def test_the_next_process_loads_the_states_of_recurrent_layers(tmp_path):
    model, url = tmp_path / "model", f"disk://{tmp_path}/kv?capacity=64MiB"
    write_tiny(model, "qwen3_next")
    first = run(model, url, "exit")
    again = run(model, url, "exit")
    assert first["loaded"] == 0
    assert again == {"loaded": 384, "tokens": first["tokens"]}
