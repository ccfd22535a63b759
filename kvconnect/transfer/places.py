"""Which connection gives way when another one comes and all places are taken."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvconnect.address import is_loopback

__all__ = ["Used", "host_of", "least_useful", "oldest"]

# A host that has more than one in so many places loses its own before others lose theirs.
_FAIR_SHARE = 4
# At least one in so many places is left to those that were of no use yet.
_NEWCOMERS = 4


class _FromHost(Protocol):
    @property
    def host(self) -> str:
        """The peer's host, as of `host_of`."""


class Used(_FromHost, Protocol):
    """What `least_useful` needs to know of a connection."""

    @property
    def used_at(self) -> float | None:
        """When it was last of use, on `time.monotonic`; ``None``: it never was."""


C = TypeVar("C", bound=_FromHost)
U = TypeVar("U", bound=Used)


def host_of(address: str) -> str:
    """Returns what all addresses of the host with this numeric `address` have in common.

    Loopback is one host, and so is a network of 64 bits of IPv6: one machine has all of each.
    """
    if is_loopback(address):
        return "loopback"
    if ":" in address and "." not in address:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    return address


def oldest(connections: Sequence[C]) -> C:
    """Returns the oldest of the host that has most, if that is more than a quarter; else of all.

    Args:
        connections: at least one, oldest first.
    """
    host, most = Counter(one.host for one in connections).most_common(1)[0]
    if most * _FAIR_SHARE <= len(connections):
        return connections[0]
    return next(one for one in connections if one.host == host)


def least_useful(connections: Sequence[U]) -> U:
    """Returns the one that loses least by making room for a newcomer.

    It is the `oldest` of those that were never of use: idle or hostile ones in any number take no
    place from those that were. Only when these have more than three quarters of the places, so
    that newcomers would push out each other, it is the one whose last use is longest ago.

    Args:
        connections: at least one, oldest first.
    """
    unused = [one for one in connections if one.used_at is None]
    if unused and len(unused) * _NEWCOMERS >= len(connections):
        return oldest(unused)
    return min(connections, key=lambda one: (one.used_at is None, one.used_at or 0.0))
