"""The server to measure: one that is started for it, or one that runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvconnect.errors import KvConnectError

__all__ = ["ServerFailed", "started_server"]

MODEL_NAME = "bench"


class ServerFailed(KvConnectError):
    """The server that was started did not come up; its own messages say why."""


@contextmanager
def started_server(model: Path, arguments: Sequence[str]) -> Iterator[str]:
    """``kvconnect serve`` in a process of its own until the end; yields its URL.

    Args:
        model: directory; clients call it `MODEL_NAME`.
        arguments: further ones of the command.

    Raises:
        ServerFailed: it ended instead.
    """
    command = [sys.executable, "-P", "-m", "kvconnect", "serve", str(model), "--port", "0"]
    command += ["--served-model-name", MODEL_NAME, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = "" if process.stdout is None else process.stdout.readline()
            if not said:
                raise ServerFailed(f"kvconnect serve ended with {process.wait()}")
            yield said.split()[-1].removesuffix("/v1")
        finally:
            process.terminate()
