"""The process that a party runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvconnect.errors import KvConnectError

_BENCHMARKS = Path(__file__).resolve().parents[2]
_PATH = (_BENCHMARKS, _BENCHMARKS.parents[1] / ".ci" / "editable")
"""The folders of `kvconnect_bench` and `kvconnect`, which hold nothing else."""

_START = """\
import os, runpy, sys
sys.path[:0] = sys.argv.pop(1).split(os.pathsep)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class PartyFailed(KvConnectError):
    """A party's process ended early; the message is the last line that it wrote."""


class Party:
    """A party in a process of its own, until `close`. A context manager; not thread-safe.

    Args:
        python: interpreter of the process; ``None``: this one, for kvconnect's own party.
        module: module to run there, with its package.
        arguments: of the module.
        before: words before the command, such as ``ip netns exec NAME``.

    Attributes:
        versions: the versions that the party reported.
        pid: id of the process.

    Raises:
        PartyFailed: the party is not installed there, or cannot start.
    """

    def __init__(
        self, python: Path | None, module: str, *arguments: str, before: Sequence[str] = ()
    ) -> None:
        path = os.pathsep.join(map(str, _PATH))
        command = [*before, python or sys.executable, "-P", "-c", _START, path, module]
        # To a file: a pipe that is not read would block a party that writes a lot.
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        self._process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self.pid = self._process.pid
        try:
            self.versions: dict[str, str] = self._answer()
        except PartyFailed:
            self.close()
            raise

    def ask(self, workload: str, **arguments: Any) -> Any:
        """Runs one of the party's workloads; blocks until the result is there.

        Raises:
            PartyFailed: the process ended instead, or the party was closed.
        """
        if self._process.stdin is None:
            raise PartyFailed("the party was closed")
        asked = json.dumps({"workload": workload, "arguments": arguments})
        try:
            self._process.stdin.write(asked + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PartyFailed(self._last_complaint()) from None
        return self._answer()

    def close(self) -> None:
        """Kills the process, whatever it is running."""
        self._process.kill()
        self._process.communicate()
        self._complaints.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            self._process.wait()
            raise PartyFailed(self._last_complaint())
        return json.loads(line)

    def _last_complaint(self) -> str:
        self._complaints.seek(0)
        lines = [line for line in self._complaints.read().splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it ended with code {self._process.poll()}"
