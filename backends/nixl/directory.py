"""The directory of instances in a Redis: each instance writes its address and reads all others."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvconnect.address import host_and_port
from kvconnect.errors import BackendUnavailable, ConfigurationError, MissingExtra, RetryLater
from kvconnect.redaction import text_without_passwords, without_passwords
from kvconnect.trace import warn_once
from kvconnect.transfer.peers import Peers

_LIVES_S = 10.0
"""The seconds after its last write for which an instance is listed."""

_REFRESH_S = 2.0
_TIMEOUT_S = 2.0
_MOST = 1024


class Directory:
    """The directory: keeps this instance in a sorted set of addresses, and connects to the others.

    The score of an address is the time when it expires. One thread writes and reads every two
    seconds, on the server's clock. While the server is gone, the peers that are known stay.

    Args:
        url: the URL of the Redis server.
        prefix: the prefix of the set's key.
        address: the address of this instance; empty: only reads the directory.
        peers: the connections, to which found instances are added.
        keep: peers that stay connected even if they are not in the directory.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        address: str,
        peers: Peers,
        *,
        keep: Collection[str] = (),
    ) -> None:
        self._shown = without_passwords(url)
        self._key = f"{prefix}peers"
        self._address = address
        self._peers = peers
        self._keep = frozenset(keep)
        self._found: set[str] = set()
        self._redis = _client(url, self._shown)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Writes and reads the directory once, then in the background; blocks for some seconds.

        Raises:
            ConfigurationError: the server refuses.
            BackendUnavailable: it cannot be reached.
        """
        self._refresh()
        self._thread = threading.Thread(
            target=self._run, name="kvconnect-nixl-directory", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Removes this instance, if the server answers; blocks for some seconds at most."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            if self._address:
                with suppress(BackendUnavailable, ConfigurationError), self._mapped():
                    self._redis.zrem(self._key, self._address)
        self._redis.close()

    def _run(self) -> None:
        while not self._closed.wait(_REFRESH_S):
            try:
                self._refresh()
            except (BackendUnavailable, ConfigurationError) as error:
                warn_once(
                    f"nixl.directory {type(error)}", f"{error}; the peers that are known stay"
                )

    def _refresh(self) -> None:
        with self._mapped():
            seconds, micros = self._redis.time()
            now = seconds + micros / 1e6
            pipe = self._redis.pipeline(transaction=True)
            if self._address:
                pipe.zadd(self._key, {self._address: now + _LIVES_S})
            pipe.zremrangebyscore(self._key, "-inf", now - _LIVES_S)
            pipe.expire(self._key, int(10 * _LIVES_S))
            pipe.zrangebyscore(self._key, now, "+inf", start=0, num=_MOST)
            members = pipe.execute()[-1]
        self._use({one for one in map(_address_of, members) if one is not None})

    def _use(self, found: set[str]) -> None:
        found.discard(self._address)
        self._peers.drop(self._found - found - self._keep)
        connect(self._peers, sorted(found), sorted(found - self._keep))
        self._found = found

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        import redis

        refusals = (
            redis.exceptions.AuthenticationError,
            redis.exceptions.NoPermissionError,
            redis.exceptions.ResponseError,
        )
        try:
            yield
        except refusals as error:
            raise ConfigurationError(
                f"directory={self._shown}: {text_without_passwords(str(error))}"
            ) from None
        except (redis.exceptions.RedisError, OSError) as error:
            raise BackendUnavailable(
                f"directory {self._shown}: {text_without_passwords(str(error))}"
            ) from None


def connect(peers: Peers, addresses: Collection[str], replaceable: Collection[str] = ()) -> None:
    """Connects to `addresses` that are not in `peers`, in the background.

    If there are too many, a random choice is connected.

    Args:
        peers: the connections; only one thread at a time may add to them.
        addresses: the addresses of peers.
        replaceable: peers that are replaced once an attempt to connect to them has failed.
    """
    links, left_out = peers.links(), 0
    new = [one for one in addresses if one not in links]
    random.shuffle(new)
    useless = [
        one
        for one in replaceable
        if one in links and links[one].channel is None and links[one].tried
    ]
    peers.drop(useless[: max(0, len(new) - peers.room)])
    for address in new:
        try:
            peers.use(address)
        except ConfigurationError as error:  # an address of the directory
            warn_once("nixl.peer", f"peer {address} is left out: {error}")
        except RetryLater:
            left_out += 1
    if left_out:
        used = len(peers.links())
        warn_once("nixl.links", f"{left_out} peers are left out: {used} are used")


def _client(url: str, shown: str) -> Any:
    try:
        import redis
    except ModuleNotFoundError as error:
        raise MissingExtra("directory=", "redis") from error
    try:
        return redis.Redis.from_url(
            url, retry=None, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        )
    except (ValueError, TypeError):
        raise ConfigurationError(
            f"directory={shown}: the URL of a Redis is needed, as in redis://host:6379/0"
        ) from None


def _address_of(member: object) -> str | None:
    """Returns the address that another instance has written, if it is valid."""
    if not isinstance(member, bytes) or len(member) > 300:
        return None
    try:
        address = member.decode()
        _, port = host_and_port(address)
    except ValueError:
        return None
    return address if port else None
