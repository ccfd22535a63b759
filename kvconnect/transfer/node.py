"""A process among those that read each other's memory: its transport, connections and leases."""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Callable

from kvconnect.address import host_and_port
from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.control.description import Compat, PoolInfo
from kvconnect.transfer.control.endpoint import Deliver, Endpoint
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.messages import Hello
from kvconnect.transfer.peers import Peers
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.transport import Transport

_REBUILT = "the transport was rebuilt"


class PeerNode:
    """The transport, connections and leases of this process. `listen` and `close` block.

    The owner opens `transport` and registers memory, starts `client` if this process reads, and
    calls `listen` if others read from it.

    Args:
        compat: the properties that must be equal at all peers; it names the transport to make.
        listen: ``host:port`` of this process; port 0 is any free one.
        advertise: where others reach this process, if that is another address.
        device: the network device of ``nixl``.
        secret: the secret that all peers share; ``None`` allows loopback only.
        rank, tp_size: which part of the KV heads this process has.
        connect_timeout_s: the longest time for a connection of the transport and its handshake.
        accepts, one_connection, idle_after_s: see `Peers`.

    Attributes:
        engine_id: the name of this incarnation of this process.
        transport: reads from peers, and is read from.
        client: the leases on peers' blocks.
        peers: the peers that this process reads from.
        pools: the description of the registered pools, for peers that connect from now on.
    """

    def __init__(
        self,
        compat: Compat,
        *,
        listen: str,
        advertise: str | None,
        device: str,
        secret: SharedSecret | None,
        rank: int = 0,
        tp_size: int = 1,
        connect_timeout_s: float = 2.0,
        accepts: Callable[[Hello], None] = lambda _: None,
        one_connection: bool = False,
        idle_after_s: float = math.inf,
    ) -> None:
        self.engine_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.pools: tuple[PoolInfo, ...] = ()
        self._compat = compat
        self._boot = secrets.token_bytes(16)
        self._part = rank, tp_size
        self._listen_at = host_and_port(listen)
        self._advertise = advertise
        self._secret = secret
        self._listener: Listener | None = None
        self._closed = False
        self.transport = self._make_transport(device, connect_timeout_s)
        self.client = LeaseClient()
        self.peers = Peers(
            self.hello,
            self.transport,
            self.client.deliver,
            secret=secret,
            accepts=accepts,
            one_connection=one_connection,
            idle_after_s=idle_after_s,
        )

    def _make_transport(self, device: str, connect_timeout_s: float) -> Transport:
        if self._compat.transport == "nixl":
            from kvconnect.transfer.nixl import NixlTransport

            return NixlTransport(
                identity=self.engine_id, device=device, connect_timeout_s=connect_timeout_s
            )
        from kvconnect.transfer.tcp import TcpTransport

        return TcpTransport(
            identity=self.engine_id,
            host=self._listen_at[0],
            advertise=None if self._advertise is None else host_and_port(self._advertise)[0],
            secret=self._secret,
            connect_timeout_s=connect_timeout_s,
        )

    def listen(self, deliver: Deliver) -> None:
        """Accepts peers that read from this process; `deliver` gets the events of their channels.

        Raises:
            ConfigurationError: the port is taken, or the address is not this machine's.
        """
        self._listener = Listener(Endpoint(self.hello, deliver, self._secret), *self._listen_at)

    @property
    def address(self) -> str:
        """The ``host:port`` where peers reach this process; empty if it does not listen."""
        return "" if self._listener is None else self._listener.address(self._advertise)

    @property
    def readers(self) -> int:
        """The number of peers that are connected to read from this process."""
        return 0 if self._listener is None else len(self._listener.channels())

    def hello(self) -> Hello:
        """Returns the description of this process; another one after `rebuild`."""
        rank, tp_size = self._part
        return Hello(
            compat=self._compat,
            engine_id=self.engine_id,
            boot=self._boot,
            rank=rank,
            tp_size=tp_size,
            local=self.transport.local(),
            pools=self.pools,
        )

    def rebuild(self) -> None:
        """Restarts the transport, so that no earlier read writes any more. Blocks.

        The connections in both directions are closed and made again. After `close` it does nothing.
        """
        if self._closed:
            return
        self.transport.rebuild()
        # The peers of both directions have to learn the new transport.
        if (listener := self._listener) is not None:
            for channel in listener.channels():
                channel.close(_REBUILT)
        self.peers.reconnect(_REBUILT)

    def close(self) -> None:
        """Ends all connections and the transport. Idempotent.

        Afterwards nothing reads or writes the registered memory.
        """
        self._closed = True
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self.peers.close()
        self.client.close()
        self.transport.close()
