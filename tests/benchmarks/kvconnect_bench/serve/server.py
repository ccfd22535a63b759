"""The server that is started to be measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvconnect.errors import KvConnectError

MODEL_NAME = "bench"


class ServerFailed(KvConnectError):
    """The server that was started did not come up; its own messages say why."""


@contextmanager
def started_server(model: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Runs ``kvconnect serve`` in a process of its own until the end; yields its URL.

    Args:
        model: directory; clients call the model `MODEL_NAME`.
        arguments: further arguments of the command.

    Raises:
        ServerFailed: the server ended instead.
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
