"""Ctrl-C and SIGTERM end a run cleanly, with what was staged saved."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import disk_url
from observed import slow

from kvconnect.cli.main import main

TEXT = "the quick brown fox jumps over the lazy dog; " * 8


def _arguments(model: Path, store: Path, *more: str) -> list[str]:
    return [
        *("generate", str(model), "--prompt", TEXT),
        *("--store", disk_url(store), "--dtype", "float64", "--tokens-per-block", "16"),
        *(
            "--kv-cache-tokens",
            "4096",
            "--lookup-timeout",
            "60s",
            "--json",
            "--no-overlap-loads",
            *more,
        ),
    ]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), *slow((signal.SIGINT, 130))],
)
def test_a_signal_saves_what_is_staged(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    store = tmp_path / "store"
    # So many tokens that it is still generating when the prompt's blocks are on disk.
    arguments = _arguments(model, store, "--max-tokens", "3500", "--ignore-eos")
    running = subprocess.Popen(
        [sys.executable, "-m", "kvconnect", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while running.poll() is None and not _holds_blocks(store):
        time.sleep(0.01)  # the processor is the child's
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == code, errors
    assert "Traceback" not in errors
    assert main(_arguments(model, store, "--max-tokens", "4")) == 0
    assert json.loads(capsys.readouterr().out)["computed_tokens"] == 1


def _holds_blocks(store: Path) -> bool:
    return any(_nbytes(path) > 1 << 16 for path in store.rglob("*"))


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # SQLite's own files come and go
        return 0
