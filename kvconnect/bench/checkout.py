"""What only a checkout of kvconnect has: the peers and the servers that benchmarks start."""

from __future__ import annotations

from pathlib import Path

from kvconnect.errors import ConfigurationError

__all__ = ["require_checkout", "require_peer_python"]


def require_checkout(what: str) -> None:
    """Return if `kvconnect.bench.peers` and `kvconnect.bench.servers` are there, for `what`.

    Raises:
        ConfigurationError: kvconnect was installed without them.
    """
    if not Path(__file__).with_name("peers").is_dir():
        raise ConfigurationError(
            f"{what}: needs a checkout of kvconnect; what it starts is not in the installed package"
        )


def require_peer_python(python: Path) -> None:
    """Return if `python` may be an interpreter that a peer runs in.

    Raises:
        ConfigurationError: there is no such file, or kvconnect was installed without the peers.
    """
    require_checkout("--peer-python")
    if not python.is_file():
        raise ConfigurationError(
            f"--peer-python: '{python}' is no file; give an environment's bin/python"
        )
