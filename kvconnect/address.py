"""The address of a peer: ``host:port``, and the check for loopback addresses."""

from __future__ import annotations

import ipaddress


def host_and_port(address: str) -> tuple[str, int]:
    """Splits ``host:port``, or ``[host]:port``.

    Raises:
        ValueError: `address` has another form.
    """
    host, colon, port = address.rpartition(":")
    plain = host.removeprefix("[").removesuffix("]")
    if not (colon and plain and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError("must be 'host:port', as '127.0.0.1:7600'; port 0 takes a free one")
    return plain, int(port)


def is_loopback(host: str) -> bool:
    """Returns whether `host` is ``localhost`` or a loopback address.

    Other names count as remote; none is resolved.
    """
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_http_url(url: str) -> bool:
    """Returns whether `url` is that of a server over HTTP."""
    return url.lower().startswith(("http://", "https://"))
