"""What NIXL and UCX print by themselves: nothing, unless they are asked to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from peer_process import MiB

HERE = Path(__file__).parent
LEVELS = ("UCX_LOG_LEVEL", "NIXL_LOG_LEVEL")


def survive(peer, kind: str, **levels: str) -> subprocess.CompletedProcess[str]:
    """Runs a process that reads from `peer` and kills it meanwhile."""
    environment = {name: value for name, value in os.environ.items() if name not in LEVELS}
    environment |= levels
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = [sys.executable, str(HERE / "survivor.py"), kind]
    return subprocess.run(
        [*script, peer.local.hex(), str(peer.process.pid)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )


def raw(output: str) -> list[str]:
    """The lines of `output` that NIXL or UCX wrote."""
    return [line for line in output.splitlines() if "UCX" in line or ".cpp:" in line]


@pytest.mark.parametrize("kind", ["nixl", pytest.param("nixl-tcp", marks=pytest.mark.slow)])
def test_a_peer_that_is_killed_while_it_is_read_leaves_no_raw_line(peer_of, kind):
    peer = peer_of(kind, seeds=[(1, 16 * MiB)])
    ended = survive(peer, kind)
    assert int(ended.stdout) > 0  # reads failed, and nothing else is on stdout
    assert raw(ended.stderr) == []


@pytest.mark.slow
def test_what_the_environment_says_is_left(peer_of):
    peer = peer_of("nixl", seeds=[(1, 16 * MiB)])
    ended = survive(peer, "nixl", UCX_LOG_LEVEL="error", NIXL_LOG_LEVEL="ERROR")
    assert raw(ended.stdout + ended.stderr)
