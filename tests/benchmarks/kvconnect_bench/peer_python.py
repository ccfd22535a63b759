"""The interpreter that a peer runs in."""

from __future__ import annotations

from pathlib import Path

from kvconnect.errors import ConfigurationError

__all__ = ["require_peer_python"]


def require_peer_python(python: Path) -> None:
    """Checks that `python` may be an interpreter.

    Raises:
        ConfigurationError: there is no such file.
    """
    if not python.is_file():
        raise ConfigurationError(
            f"--peer-python: '{python}' is no file; give an environment's bin/python"
        )
