"""The transport that a setting names."""

from __future__ import annotations

from typing import Literal

from kvconnect.address import host_and_port
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.transport import Transport

__all__ = ["transport_of"]


def transport_of(
    kind: Literal["nixl", "tcp"],
    identity: str,
    *,
    listen: str,
    advertise: str | None,
    device: str,
    secret: SharedSecret | None,
    connect_timeout_s: float = 2.0,
) -> Transport:
    """Returns the transport `kind`, which is not open yet.

    Args:
        kind: what blocks travel by.
        identity: of this incarnation of this process.
        listen: ``host:port`` of this process, of which ``tcp`` takes the host.
        advertise: where others reach it, if that is another host.
        device: the network device of ``nixl``.
        secret: of ``tcp``'s connections.
        connect_timeout_s: for a connection and its handshake.
    """
    if kind == "nixl":
        from kvconnect.transfer.nixl import NixlTransport

        return NixlTransport(identity=identity, device=device, connect_timeout_s=connect_timeout_s)
    from kvconnect.transfer.tcp import TcpTransport

    return TcpTransport(
        identity=identity,
        host=host_and_port(listen)[0],
        advertise=None if advertise is None else host_and_port(advertise)[0],
        secret=secret,
        connect_timeout_s=connect_timeout_s,
    )
