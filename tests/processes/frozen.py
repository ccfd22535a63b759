"""Freezes processes for tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def freeze(pid: int) -> None:
    """Sends SIGSTOP to a process; ends when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    while not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZX"  # or ended
    except OSError:  # it has ended
        return True
