"""The address that a source listens on, and the one that readers connect to."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import Field

from kvconnect.address import is_loopback
from kvconnect.errors import ConfigurationError
from kvconnect.transfer.local import Local


class TcpLocal(Local):
    """The description that a `TcpTransport` sends to its peers."""

    transport: Literal["tcp"] = "tcp"
    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)]


def advertised(host: str, advertise: str | None, *, has_secret: bool) -> str:
    """Returns the host name that peers connect to.

    Raises:
        ConfigurationError: `host` is beyond loopback and there is no secret, or it stands for all
            addresses and none is advertised.
    """
    if not is_loopback(host) and not has_secret:
        raise ConfigurationError(
            f"host={host!r} is beyond loopback: set a secret, the same on all peers"
        )
    if _is_every_address(host) and advertise is None:
        raise ConfigurationError(
            f"host={host!r} is every address: set advertise to the one that peers connect to"
        )
    return advertise if advertise is not None else host


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""
