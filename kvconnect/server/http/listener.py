"""The sockets that a server listens on; beyond loopback they need an API key."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvconnect.address import is_loopback
from kvconnect.errors import ConfigurationError
from kvconnect.server.settings import HttpSettings

_BACKLOG = 2048

_Address: TypeAlias = tuple[Any, ...]
"""An address of the socket module: host and port first, for IPv6 two numbers more."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A set of bound sockets, one for each address of a host; `listen` makes them accept.

    Attributes:
        sockets: the bound sockets, all of one port.
        host: the host of the settings.
        port: the bound port.
    """

    sockets: tuple[socket.socket, ...]
    host: str
    port: int

    @classmethod
    def bind(cls, settings: HttpSettings) -> Listener:
        """Binds the port of `settings`; may block to resolve a name.

        Raises:
            ConfigurationError: the host is unknown, the port cannot be bound, or the host is not
                loopback and there is no API key. Nothing is bound then.
        """
        addresses = _addresses(settings)
        _check_key(settings, [str(address[0]) for _, address in addresses])
        sockets: list[socket.socket] = []
        port = settings.port
        try:
            for family, address in addresses:
                sockets.append(_bound(family, (address[0], port, *address[2:])))
                port = sockets[0].getsockname()[1]  # the same for all addresses
        except OSError as error:
            for one in sockets:
                one.close()
            raise _refused(settings.host, port, error) from error
        return cls(tuple(sockets), settings.host, port)

    @property
    def url(self) -> str:
        """The URL of the server for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def listen(self) -> None:
        """Starts listening; the system queues clients until they are accepted.

        Raises:
            ConfigurationError: another process took the port meanwhile.
        """
        for one in self.sockets:
            try:
                one.listen(_BACKLOG)
            except OSError as error:
                raise _refused(self.host, self.port, error) from error

    def close(self) -> None:
        """Releases the port. Idempotent."""
        for one in self.sockets:
            one.close()


def _addresses(settings: HttpSettings) -> list[tuple[socket.AddressFamily, _Address]]:
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"host: '{settings.host}' cannot be resolved ({error}); give an address of this "
            "machine, as 127.0.0.1"
        ) from error
    # In order, each once.
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def _check_key(settings: HttpSettings, addresses: list[str]) -> None:
    beyond = [one for one in addresses if not is_loopback(one)]
    if beyond and settings.api_key is None:
        raise ConfigurationError(
            f"host: '{settings.host}' can be reached from other machines; set an API key "
            "(KVCONNECT_API_KEY or --api-key), or listen on 127.0.0.1"
        )


def _bound(family: socket.AddressFamily, address: _Address) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _refused(host: str, port: int, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"port: {port} on '{host}' cannot be listened to ({error.strerror}); give another, or 0 "
        "for any that is free"
    )
