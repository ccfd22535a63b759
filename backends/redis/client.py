"""What redis-py is told when it makes a connection."""

from __future__ import annotations

from typing import Any

from kvconnect.backends.redis.settings import RedisSettings

__all__ = ["connection_options", "transport_options"]


def connection_options(settings: RedisSettings) -> dict[str, Any]:
    """Of connections to the servers that hold the keys, but for TLS's class of connection."""
    options: dict[str, Any] = {
        "db": settings.db,
        "username": settings.username,
        "password": settings.password,
        **transport_options(settings),
    }
    tls = settings.tls
    if tls is not None:
        options |= {
            "ssl_ca_certs": tls.ca,
            "ssl_certfile": tls.cert,
            "ssl_keyfile": tls.key,
            "ssl_cert_reqs": "required" if tls.verify else "none",
            "ssl_check_hostname": tls.verify,
        }
    return options


def transport_options(settings: RedisSettings) -> dict[str, Any]:
    """The part of these that is the same for any server."""
    return {
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.timeout,
        "socket_keepalive": True,
        "protocol": 2,
    }
