"""What only a checkout of kvconnect has: the peers and the servers that benchmarks start."""

from __future__ import annotations

from pathlib import Path

from kvconnect.errors import ConfigurationError

__all__ = ["require_checkout"]


def require_checkout(what: str) -> None:
    """Return if `kvconnect.bench.peers` and `kvconnect.bench.servers` are there, for `what`.

    Raises:
        ConfigurationError: kvconnect was installed without them.
    """
    if not Path(__file__).with_name("peers").is_dir():
        raise ConfigurationError(
            f"{what}: needs a checkout of kvconnect; what it starts is not in the installed package"
        )
