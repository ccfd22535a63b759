"""Connections to a server, which redis-py makes, and what it is told for that."""

from __future__ import annotations

import select
import socket
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

from kvconnect.backends.redis.settings import Address, RedisSettings

__all__ = [
    "connection_options",
    "connection_to",
    "end",
    "is_idle",
    "socket_of",
    "transport_options",
]


def connection_options(settings: RedisSettings) -> dict[str, Any]:
    """Returns the options of connections to the servers that hold the keys."""
    return {
        "db": settings.db,
        "username": settings.username,
        "password": settings.password,
        **transport_options(settings),
    }


def transport_options(settings: RedisSettings) -> dict[str, Any]:
    """Returns those of these that are the same for any server, sentinels too."""
    options: dict[str, Any] = {
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.timeout,
        "socket_keepalive": True,
        "protocol": 2,
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


def connection_to(address: Address, settings: RedisSettings) -> AbstractConnection:
    """Returns a connection that is not made yet."""
    options = {**connection_options(settings), "retry": Retry(NoBackoff(), 0)}
    if not address.port:
        del options["socket_keepalive"]  # of TCP
        return redis.UnixDomainSocketConnection(  # type: ignore[abstract, no-untyped-call]
            path=address.host, **options
        )
    kind = redis.Connection if settings.tls is None else redis.SSLConnection
    return kind(host=address.host, port=address.port, **options)


def end(connection: AbstractConnection) -> None:
    """Closes `connection`, whatever state it is in."""
    connection.disconnect()  # type: ignore[no-untyped-call]


def socket_of(connection: AbstractConnection) -> Any:
    """Returns the socket of `connection`; ``None``: it has none yet."""
    return connection._sock  # noqa: SLF001  there is no public way to it


def is_idle(sock: socket.socket | None) -> bool:
    """Returns whether nothing is unread on `sock`, and neither end has closed it."""
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)
