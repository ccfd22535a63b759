"""The `Transport` methods over TCP. The modules beside this one do the work."""

from __future__ import annotations

import ipaddress
import secrets
import threading
from typing import TYPE_CHECKING

from kvconnect.errors import ConfigurationError, PullFailed, UsageError
from kvconnect.transfer.local import decode, encode
from kvconnect.transfer.pull import Deadlines
from kvconnect.transfer.reads import Offsets
from kvconnect.transfer.regions import Regions, refusal, require_local
from kvconnect.transfer.secret import SharedSecret, require_secret
from kvconnect.transfer.tcp.kept_digests import KeptDigests
from kvconnect.transfer.tcp.peer import TcpLocal, TcpPeer
from kvconnect.transfer.tcp.source import Source
from kvconnect.transfer.tcp.tcp_pull import TcpPull, split
from kvconnect.transfer.transport import PeerHandle, Pull, Reads, Transport

if TYPE_CHECKING:
    from torch import Tensor


class TcpTransport(Transport):
    """Reads over plain sockets.

    A killed peer is seen at once, a partition in 3 s, a frozen peer by a pull's deadline only.

    Args:
        identity: this transport's name, the same after a restart; random if not given.
        host: address to listen on; beyond loopback only with a `secret`.
        port: 0 takes a free one, which it keeps over `rebuild`.
        advertise: address that peers connect to, if it is not `host`.
        secret: shared by all peers; authenticates connections, encrypts nothing.
        connections: the most connections to each peer, 1 to 64; pulls below 16 MiB use one.
        connect_timeout_s: the longest time for a connection and its handshake.
    """

    quiescent_after_error = True

    def __init__(
        self,
        *,
        identity: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        secret: SharedSecret | None = None,
        connections: int = 2,
        connect_timeout_s: float = 2.0,
    ) -> None:
        self._identity = identity or f"tcp-{secrets.token_hex(8)}"
        self._advertised = _advertised_host(host, advertise, secret)
        self._listen_on = (host, port)
        if not 1 <= connections <= 64:
            raise ConfigurationError(f"connections={connections}: must be 1 to 64")
        if not connect_timeout_s > 0:
            raise ConfigurationError(f"connect_timeout_s={connect_timeout_s}: must be > 0")
        self._connections = connections
        self._connect_s = connect_timeout_s
        self._secret = secret
        self._regions = Regions()
        self._changing = threading.Lock()  # held by `open`, `rebuild` and `close`
        self._lock = threading.Lock()
        self._peers: dict[str, TcpPeer] = {}
        self._former: list[TcpPeer] = []  # disconnected, whose lanes may still run
        self._source: Source | None = None
        self._deadlines: Deadlines | None = None
        self._kept = KeptDigests(self._regions)
        self._incarnation = ""

    def open(self) -> None:
        """Starts to listen, as `Transport.open` describes."""
        with self._changing:
            if self._deadlines is not None:
                raise UsageError("the transport is open")
            self._listen()
            self._deadlines = Deadlines()

    def register(self, memory: Tensor) -> int:
        """Registers `memory`, as `Transport.register` describes, before or after `open`."""
        return self._regions.add(memory)

    def local(self) -> bytes:
        """Returns the bytes that a peer passes to `connect`, as `Transport.local` describes."""
        if self._source is None:
            raise UsageError("the transport is not open")
        return encode(
            TcpLocal(
                identity=self._identity,
                incarnation=self._incarnation,
                regions=self._regions.sizes(),
                host=self._advertised,
                port=self._listen_on[1],
            )
        )

    def connect(self, peer_local: bytes) -> TcpPeer:
        """Connects as `Transport.connect` describes. Blocks for at most `connect_timeout_s`."""
        if self._source is None:
            raise UsageError("the transport is not open")
        peer = TcpPeer(
            decode(TcpLocal, peer_local),
            self._regions,
            self._secret,
            lanes=self._connections,
            connect_s=self._connect_s,
        )
        peer.connect()
        with self._lock:
            closed = self._source is None
            earlier = peer if closed else self._peers.get(peer.identity)
            if not closed:
                self._peers[peer.identity] = peer
            if earlier is not None:
                self._retire(earlier)
        if earlier is not None:
            earlier.stop(PullFailed("peer", f"{peer.identity} connected anew"))
        if closed:
            raise UsageError("the transport was closed")
        return peer

    def disconnect(self, peer: PeerHandle) -> None:
        """Fails the pulls from `peer` and forgets the peer. Idempotent; does not block."""
        known = self._known(peer)
        with self._lock:
            if self._peers.get(known.identity) is known:
                del self._peers[known.identity]
                self._retire(known)
        known.stop(PullFailed("peer", f"{known.identity} was disconnected"))

    def pull(self, peer: PeerHandle, reads: Reads, *, deadline_s: float) -> Pull:
        """Begins to read, as `Transport.pull` describes. Does not block."""
        known, deadlines = self._known(peer), self._deadlines
        if deadlines is None:
            raise UsageError("the transport is not open")
        require_local(self._regions, reads, deadline_s)
        pull = TcpPull(reads.total_nbytes)
        refused = refusal(known.identity, known.regions, reads)
        if refused is not None:
            pull.finish(refused)
            return pull
        known.take(pull, split(pull, reads, self._connections))
        deadlines.watch(pull, deadline_s)
        return pull

    def keep_digests(self, region: int, offsets: Offsets, nbytes: int, *, epoch: int) -> None:
        """Digests pieces on a thread of this transport; see `KeptDigests`. Does not block."""
        self._kept.keep(region, offsets, nbytes, epoch)

    def drop_digests(self, epoch: int) -> None:
        """Forgets digests, as `Transport.drop_digests` describes."""
        self._kept.drop(epoch)

    def rebuild(self) -> None:
        """Ends all reads and listens on the same port again, as `Transport.rebuild` describes.

        Raises:
            ConfigurationError: it cannot listen, for example because another process has taken the
                port. No read works until a later `rebuild` succeeds.
        """
        with self._changing:
            if self._deadlines is None:
                raise UsageError("the transport is not open")
            self._end(PullFailed("closed", "the transport is built anew"))
            self._listen()

    def close(self) -> None:
        """Ends every pull, all connections and threads. Idempotent; blocks."""
        with self._changing:
            if self._source is not None:
                self._end(PullFailed("closed", "the transport was closed"))
            if self._deadlines is not None:
                self._deadlines.close()
                self._deadlines = None
            self._regions.clear()
            self._kept.close()

    def _listen(self) -> None:
        incarnation = secrets.token_bytes(16)
        host, port = self._listen_on
        source = Source(self._regions, self._kept, self._secret, incarnation, host, port)
        self._listen_on = (host, source.port)
        self._source, self._incarnation = source, incarnation.hex()

    def _end(self, error: PullFailed) -> None:
        source, self._source = self._source, None
        with self._lock:
            peers = [*self._peers.values(), *self._former]
            self._peers.clear()
            self._former.clear()
        for peer in peers:
            peer.stop(error)
        for peer in peers:
            peer.join()
        if source is not None:
            source.close()

    def _retire(self, peer: TcpPeer) -> None:
        self._former = [former for former in self._former if not former.ended]
        self._former.append(peer)

    def _known(self, peer: PeerHandle) -> TcpPeer:
        if not isinstance(peer, TcpPeer):
            raise UsageError(f"{peer!r} is no peer of a TcpTransport")
        return peer


def _advertised_host(host: str, advertise: str | None, secret: SharedSecret | None) -> str:
    """Returns the host name that peers connect to.

    Raises:
        ConfigurationError: `host` is beyond loopback and there is no secret, or it stands for all
            addresses and none is advertised.
    """
    require_secret("host", host, secret)
    if _is_every_address(host) and advertise is None:
        raise ConfigurationError(
            f"host={host!r} is every address: set advertise to the one that peers connect to"
        )
    return advertise if advertise is not None else host


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""
