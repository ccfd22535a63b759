"""The settings of a Redis store, and the parser of its URL."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from kvconnect.backend import DEFAULT_PIN_FRACTION
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError
from kvconnect.redaction import HIDDEN, shown_host

DEFAULT_PREFIX = "kvconnect:"
# A server works on one thread: two connections keep it busy, more make its caches colder.
DEFAULT_CONNECTIONS = 2
DEFAULT_TIMEOUT = 5.0
MAX_CONNECTIONS = 64
_COMMON = ("connections", "pin_fraction", "prefix", "timeout", "ttl")
_TLS = ("tls_ca", "tls_cert", "tls_key", "tls_verify")
_UNIX = "redis+unix"
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\[\]:@/]+))(?::(?P<port>\d+))?")


class Mode(enum.Enum):
    """The way to find the server that holds a key."""

    SINGLE = "redis"
    SENTINEL = "redis+sentinel"
    CLUSTER = "redis+cluster"


SCHEMES = {
    "redis": Mode.SINGLE,
    "rediss": Mode.SINGLE,
    _UNIX: Mode.SINGLE,
    "redis+sentinel": Mode.SENTINEL,
    "redis+cluster": Mode.CLUSTER,
}
_DEFAULT_PORTS = {Mode.SINGLE: 6379, Mode.SENTINEL: 26379, Mode.CLUSTER: 6379}


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """The address of one server.

    Attributes:
        host: the host, or the path of a local socket.
        port: the port; 0 for a local socket.
    """

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """The encryption of connections.

    Attributes:
        ca: file of trusted certificates, instead of the system's.
        cert, key: files of the client's certificate, if the server requires one.
        verify: true to check the server's certificate and its name.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    verify: bool = True


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The settings in a Redis URL.

    Attributes:
        hosts: the server, the sentinels, or some nodes of the cluster.
        service: the name the sentinels know the server by.
        prefix: before every key.
        ttl: seconds after which a block is gone; ``None``: never.
        connections: for values, to each server; so many to fetch and so many to store.
        pin_fraction: the share of the servers' ``maxmemory`` that pinned blocks may take, 0 to 1.
        timeout: seconds; a connection on which next to nothing passes for so long is closed.
        tls: ``None``: not encrypted.
    """

    hosts: tuple[Address, ...]
    mode: Mode = Mode.SINGLE
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    prefix: str = DEFAULT_PREFIX
    ttl: float | None = None
    pin_fraction: float = DEFAULT_PIN_FRACTION
    connections: int = DEFAULT_CONNECTIONS
    timeout: float = DEFAULT_TIMEOUT
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ConfigurationError(
                f"connections={self.connections}: must be from 1 to {MAX_CONNECTIONS}"
            )
        if not self.prefix or any(letter in "{}" or letter <= " " for letter in self.prefix):
            # Text in braces would send all keys to one node of a cluster.
            raise ConfigurationError(
                f"prefix={self.prefix!r}: must not be empty nor contain spaces, '{{' or '}}'"
            )
        if self.ttl is not None and self.ttl < 1e-3:
            raise ConfigurationError(f"ttl={self.ttl}: must be at least one millisecond")
        if self.timeout < 1e-3:  # a time below the system's resolution would mean no limit
            raise ConfigurationError(f"timeout={self.timeout:g}: must be at least one millisecond")

    def __str__(self) -> str:
        scheme = self.mode.value if self.hosts[0].port else _UNIX
        return f"{scheme}://{','.join(map(str, self.hosts))}"

    def hide_passwords(self, text: str) -> str:
        """Returns a server's message `text` without passwords: some messages quote commands."""
        given = (word for word in (self.password, self.sentinel_password) if word)
        spellings = {one for word in given for one in (word, repr(word)[1:-1], quote(word, ""))}
        for word in sorted(spellings, key=len, reverse=True):
            # A shorter password is no secret, and would match in every text.
            text = text.replace(word, HIDDEN) if len(word) > 3 else text
        return text

    @classmethod
    def from_url(cls, url: StoreUrl) -> RedisSettings:
        """Returns the settings in `url`.

        Raises:
            ConfigurationError: names the part of `url` that is wrong, and what is right.
        """
        mode = SCHEMES[url.scheme]
        unix = url.scheme == _UNIX
        more = () if mode is Mode.SINGLE else ("tls",)
        sentinel = ("sentinel_password", "sentinel_user") if mode is Mode.SENTINEL else ()
        url.allow(*_COMMON, *(("db",) if unix else _TLS), *more, *sentinel)
        userinfo, _, location = url.location.rpartition("@")
        username, colon, password = userinfo.partition(":")
        # Checked first, since an invalid host may be a password that continues in the path.
        hosts = (_socket(url, location),) if unix else _hosts(url, location, mode)
        service, db = ("", url.whole("db", 0)) if unix else _path(url, mode)
        encrypted = url.scheme == "rediss" or (more and url.choice("tls", "no", "yes") == "yes")
        if not encrypted:
            _refuse_tls(url)
        return cls(
            hosts=hosts,
            mode=mode,
            service=service,
            db=db,
            username=unquote(username) or None,
            password=unquote(password) if colon else None,
            sentinel_username=url.query.get("sentinel_user"),
            sentinel_password=url.query.get("sentinel_password"),
            prefix=url.query.get("prefix", DEFAULT_PREFIX),
            ttl=url.duration("ttl"),
            pin_fraction=url.fraction("pin_fraction", DEFAULT_PIN_FRACTION),
            connections=url.whole("connections", DEFAULT_CONNECTIONS),
            timeout=url.duration("timeout") or DEFAULT_TIMEOUT,
            tls=_tls(url) if encrypted else None,
        )


def _hosts(url: StoreUrl, location: str, mode: Mode) -> tuple[Address, ...]:
    texts = location.split(",")
    if mode is Mode.SINGLE and len(texts) > 1:
        raise ConfigurationError(
            f"{url}: {url.scheme} takes one host; several are the nodes of redis+cluster:// or the "
            "sentinels of redis+sentinel://"
        )
    hosts = []
    for text in texts:
        match = _HOST.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"{url}: host '{shown_host(text)}': host or host:port is needed"
            )
        port = int(match["port"] or _DEFAULT_PORTS[mode])
        if not 0 < port < 65536:
            raise ConfigurationError(
                f"{url}: port {shown_host(f':{port}')[1:]}: must be from 1 to 65535"
            )
        hosts.append(Address(unquote(match["v6"] or match["name"]), port))
    return tuple(hosts)


def _socket(url: StoreUrl, location: str) -> Address:
    if location or not url.path.strip("/"):
        raise ConfigurationError(
            f"{url}: the path of a socket is needed, as in {_UNIX}:///run/redis/redis.sock"
        )
    return Address(url.path, 0)


def _path(url: StoreUrl, mode: Mode) -> tuple[str, int]:
    """Returns the service and the database: from ``/0``, with sentinels from ``/mymaster/0``."""
    if "@" in url.path:
        raise ConfigurationError(f"{url}: in user and password write %2F for '/', %40 for '@'")
    parts = [part for part in url.path.split("/") if part]
    service = ""
    if mode is Mode.SENTINEL:
        if not parts:
            raise ConfigurationError(
                f"{url}: the name of the service is needed: {url.scheme}://sentinel:26379/mymaster"
            )
        service = parts.pop(0)
    if len(parts) > 1 or (parts and not parts[0].isdecimal()):
        raise ConfigurationError(
            f"{url}: path '{url.path}': the number of a database is needed, as in /0"
        )
    db = int(parts[0]) if parts else 0
    if mode is Mode.CLUSTER and db:
        raise ConfigurationError(f"{url}: path '{url.path}': a cluster has no database but 0")
    return service, db


def _tls(url: StoreUrl) -> Tls:
    files = {name: url.query.get(f"tls_{name}") for name in ("ca", "cert", "key")}
    for name, file in files.items():
        if file is not None and not Path(file).is_file():
            raise ConfigurationError(f"tls_{name}={file}: there is no such file")
    if files["key"] is not None and files["cert"] is None:
        raise ConfigurationError(
            f"tls_key={files['key']}: is the key of tls_cert, which is missing"
        )
    verify = url.choice("tls_verify", "yes", "no") == "yes"
    return Tls(files["ca"], files["cert"], files["key"], verify)


def _refuse_tls(url: StoreUrl) -> None:
    for name in url.query:
        if name.startswith("tls_"):
            remedy = "rediss://" if url.scheme == "redis" else "tls=yes"
            raise ConfigurationError(f"{url}: {name} is given, but no TLS; write {remedy}")
