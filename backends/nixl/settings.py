"""The settings of a nixl store, and the parser of its URL."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

from kvconnect.address import host_and_port
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError
from kvconnect.redaction import shown_host, without_passwords
from kvconnect.transfer.control.keyed import Verify
from kvconnect.transfer.secret import SharedSecret, require_secret

_PARAMETERS = (
    *("advertise", "capacity", "device", "directory", "lease", "listen", "patience", "prefix"),
    *("secret_file", "staging", "timeout", "transport", "verify"),
)
_DIRECTORIES = ("redis", "rediss", "unix")
_LEAST_STAGING = 1 << 20
_MAX_PEERS = 64
_ANY = frozenset(("0.0.0.0", "::"))  # noqa: S104  to refuse them without `advertise`


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """The settings in a ``nixl:`` URL.

    Attributes:
        peers: ``host:port`` of each peer; this instance itself may be among them.
        directory: URL of a Redis in which instances find each other; ``None``: only `peers` are
            used.
        prefix: the prefix of the directory's key; instances with the same prefix are peers.
        listen: ``host:port`` that peers connect to; port 0 uses a free one.
        advertise: ``host:port`` at which peers reach this instance, if it differs from `listen`;
            port 0: the same port.
        transport: the transport of blocks.
        device: the network device of ``nixl``, as UCX names it.
        secret: the secret that all peers share; required beyond loopback.
        capacity: the most bytes of blocks that this instance publishes.
        staging: bytes of memory for blocks of peers on their way to buffers that are not
            registered.
        verify: which blocks are compared with the owner's digests.
        lease_s: seconds for which a silent peer may read the blocks that it claimed.
        timeout_s: seconds that a peer may take to answer, and to deliver beside the time of the
            bytes.
        patience_s: seconds that a lookup waits for the peers.
    """

    peers: tuple[str, ...] = ()
    directory: str | None = field(default=None, repr=False)
    prefix: str = "kvconnect:"
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    transport: Literal["nixl", "tcp"] = "nixl"
    device: str = "lo"
    secret: str | None = field(default=None, repr=False)
    capacity: int = 1 << 30
    staging: int = 64 << 20
    verify: Verify = "sample"
    lease_s: float = 10.0
    timeout_s: float = 2.0
    patience_s: float = 0.05

    def __post_init__(self) -> None:
        if len(self.peers) > _MAX_PEERS:
            raise ConfigurationError(f"peers: {len(self.peers)} are given; at most {_MAX_PEERS}")
        if self.staging < _LEAST_STAGING:
            raise ConfigurationError(f"staging={self.staging}: must be at least 1MiB")
        if not self.prefix or any(letter <= " " for letter in self.prefix):
            raise ConfigurationError(f"prefix={self.prefix!r}: must not be empty nor have spaces")
        self._check_addresses()
        if self.directory is not None:
            _check_directory(self.directory)

    def _check_addresses(self) -> None:
        secret = self.shared_secret()
        for address in self.peers:
            _, port = _host_and_port("peer", address)
            if not port:
                raise ConfigurationError(f"peer '{address}': must have a port from 1 to 65535")
        host, _ = _host_and_port("listen", self.listen)
        peers = (("peer", host_and_port(one)[0]) for one in self.peers)
        for name, each in (("listen", host), *peers):
            try:
                require_secret(name, each, secret)
            except ConfigurationError as error:
                raise ConfigurationError(f"{error}, with secret_file=") from error
        if self.advertise is not None:
            _host_and_port("advertise", self.advertise)
        elif host in _ANY:
            raise ConfigurationError(
                f"listen={self.listen}: is no address that peers can connect to; give "
                "advertise=host:port as well"
            )

    def __str__(self) -> str:
        return f"nixl://{','.join(self.peers)}"

    def shared_secret(self) -> SharedSecret | None:
        """Returns the shared secret, which peers prove to know.

        Raises:
            ConfigurationError: the secret is too short.
        """
        if self.secret is None:
            return None
        try:
            return SharedSecret(self.secret)
        except ConfigurationError as error:
            raise ConfigurationError(f"secret_file: {error}") from error

    @classmethod
    def from_url(cls, url: StoreUrl) -> NixlSettings:
        """Returns the settings in `url`.

        Raises:
            ConfigurationError: names the part of `url` that is wrong, and what is right.
        """
        url.allow(*_PARAMETERS)
        if "@" in url.location:
            raise ConfigurationError(f"{url}: takes no user; peers share a secret_file")
        if url.path.strip("/"):
            raise ConfigurationError(f"{url}: has no path; write nixl://host:port,host:port")
        defaults = cls()
        advertise = url.query.get("advertise")
        return cls(
            peers=tuple(one for one in url.location.split(",") if one),
            directory=url.query.get("directory"),
            prefix=url.query.get("prefix", defaults.prefix),
            listen=url.query.get("listen", defaults.listen),
            advertise=advertise,
            transport=cast("Literal['nixl', 'tcp']", url.choice("transport", "nixl", "tcp")),
            device=url.query.get("device", defaults.device),
            secret=_secret(url.query.get("secret_file")),
            capacity=url.size("capacity") or defaults.capacity,
            staging=url.size("staging") or defaults.staging,
            verify=cast("Verify", url.choice("verify", "sample", "full", "none")),
            lease_s=url.duration("lease") or defaults.lease_s,
            timeout_s=url.duration("timeout") or defaults.timeout_s,
            patience_s=url.duration("patience") or defaults.patience_s,
        )


def _host_and_port(name: str, address: str) -> tuple[str, int]:
    try:
        return host_and_port(address)
    except ValueError as error:
        raise ConfigurationError(f"{name} '{shown_host(address)}': {error}") from None


def _check_directory(url: str) -> None:
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        port_is_fine = False
    if not port_is_fine or parts.scheme not in _DIRECTORIES or not (parts.netloc or parts.path):
        raise ConfigurationError(
            f"directory={without_passwords(url)}: the URL of a Redis is needed, as in "
            "redis://host:6379/0"
        )


def _secret(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise ConfigurationError(f"secret_file {path}: cannot be read: {reason}") from error
