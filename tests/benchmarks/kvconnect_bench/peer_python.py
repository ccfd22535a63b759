"""The interpreter that a peer runs in."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigurationError


def add_peer_python(parser: argparse.ArgumentParser, what: str, **more: Any) -> None:
    """Adds ``--peer-python``, the interpreter of an environment with `what`."""
    about = f"bin/python of an environment with {what}"
    parser.add_argument("--peer-python", type=Path, metavar="PYTHON", help=about, **more)


def require_peer_python(python: Path) -> None:
    """Checks that `python` may be an interpreter.

    Raises:
        ConfigurationError: there is no such file.
    """
    if not python.is_file():
        raise ConfigurationError(
            f"--peer-python: '{python}' is no file; give an environment's bin/python"
        )
