"""The choice of the connection that is closed for a new one when all places are taken."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvconnect.address import is_loopback

__all__ = ["Used", "host_of", "least_useful", "oldest"]

# A host that has more than one in so many places loses its own before others lose theirs.
_FAIR_SHARE = 4
# At least one in so many places is left to connections that were never used.
_NEWCOMERS = 4


class _FromHost(Protocol):
    @property
    def host(self) -> str:
        """The peer's host, as of `host_of`."""


class Used(_FromHost, Protocol):
    """The properties of a connection that `least_useful` compares."""

    @property
    def used_at(self) -> float | None:
        """The time of its last use, on `time.monotonic`; ``None`` if it was never used."""


C = TypeVar("C", bound=_FromHost)
U = TypeVar("U", bound=Used)


def host_of(address: str) -> str:
    """Returns the part that all addresses of the host with this numeric `address` share.

    All of loopback is one host, and so is an IPv6 network of 64 bits, since one machine has all of
    either.
    """
    if is_loopback(address):
        return "loopback"
    if ":" in address and "." not in address:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    return address


def oldest(connections: Sequence[C]) -> C:
    """Returns the oldest connection of the host that has most of them.

    If no host has more than a quarter of the connections, it is the oldest of all.

    Args:
        connections: at least one, oldest first.
    """
    host, most = Counter(one.host for one in connections).most_common(1)[0]
    if most * _FAIR_SHARE <= len(connections):
        return connections[0]
    return next(one for one in connections if one.host == host)


def least_useful(connections: Sequence[U]) -> U:
    """Returns the connection to close for a new one.

    It is the `oldest` of the connections that were never used: idle or hostile ones replace no used
    one, however many they are. If the used ones have more than three quarters of the places,
    newcomers would replace each other. Then it is the connection whose last use is longest ago.

    Args:
        connections: at least one, oldest first.
    """
    unused = [one for one in connections if one.used_at is None]
    if unused and len(unused) * _NEWCOMERS >= len(connections):
        return oldest(unused)
    return min(connections, key=lambda one: (one.used_at is None, one.used_at or 0.0))
