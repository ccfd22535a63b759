"""The resources that an instance opens to read from its peers and to be read by them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvconnect.backends.host.blocks import HostBlocks
from kvconnect.backends.nixl.directory import Directory, connect
from kvconnect.backends.nixl.publish import Publisher
from kvconnect.backends.nixl.settings import NixlSettings
from kvconnect.backends.nixl.staging import Staging
from kvconnect.errors import ConfigurationError, PeerRefused
from kvconnect.transfer.control.description import Compat
from kvconnect.transfer.node import PeerNode

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = 2
"""The version of the meaning of a key and of the bytes of its block."""

_POLL_S = 0.01
# Seconds without use of the store after which lost peers are tried rarely.
_IDLE_AFTER_S = 10.0


class NixlNode(PeerNode):
    """The node of one instance, with its blocks and its directory. `open` and `close` block.

    Args:
        settings: the store's settings.
        blocks: the blocks that it publishes.
        staging: the memory that receives blocks of peers.
    """

    def __init__(self, settings: NixlSettings, blocks: HostBlocks, staging: Staging) -> None:
        super().__init__(
            # Keys identify the content of a block, so one store may hold blocks of any model.
            Compat(
                model="kvconnect: blocks by key",
                dtype="uint8",
                num_layers=0,
                num_kv_heads=0,
                key_dim=0,
                value_dim=0,
                block_format=_FORMAT,
                transport=settings.transport,
            ),
            listen=settings.listen,
            advertise=settings.advertise,
            device=settings.device,
            secret=settings.shared_secret(),
            connect_timeout_s=settings.timeout_s,
            one_connection=True,  # a peer that is avoided under one name is avoided under all
            idle_after_s=_IDLE_AFTER_S,
        )
        self._settings = settings
        self._blocks = blocks
        self._staging = staging
        self._publisher: Publisher | None = None
        self._directory: Directory | None = None

    def open(self, *, publish: bool) -> None:
        """Registers memory, listens if it is to `publish`, and connects to the peers.

        Waits for each peer's answer, for ``timeout_s`` at most; a peer that is not running is
        connected later.

        Raises:
            ConfigurationError: the transport cannot be used, the port is taken, a peer does not
                fit, or the directory refuses. The caller must call `close`.
            BackendUnavailable: the directory cannot be reached.
        """
        settings = self._settings
        self.transport.open()
        region = self.transport.register(self._blocks.region.tensor)
        self._staging.region = self.transport.register(self._staging.tensor)
        self.client.start()
        if publish:
            self._publisher = publisher = Publisher(self._blocks, region, settings.lease_s)
            publisher.server.start()
            self.listen(publisher.deliver)
        connect(self.peers, settings.peers)
        if settings.directory is not None:
            self._directory = Directory(
                settings.directory, settings.prefix, self.address, self.peers, keep=settings.peers
            )
            self._directory.open()
        self._wait_for_peers(settings.timeout_s)

    def _wait_for_peers(self, timeout_s: float) -> None:
        """Blocks until an attempt to connect to each has ended, `timeout_s` at most."""
        until = time.monotonic() + timeout_s
        for link in self.peers.links().values():
            while not link.tried and time.monotonic() < until:
                time.sleep(_POLL_S)
            if isinstance(link.error, PeerRefused):
                raise ConfigurationError(f"peer {link.address}: {link.error}") from link.error

    def close(self) -> None:
        """Ends all connections: no transfer accesses the registered memory any more. Idempotent."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()
        super().close()
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def register(self, memory: Tensor) -> None:
        """Registers `memory`, so that blocks of peers arrive in it without a copy; after `open`."""
        self._staging.add(self.transport.register(memory), memory)

    @property
    def leases(self) -> int:
        """The number of peers' leases of blocks of this instance."""
        return 0 if self._publisher is None else self._publisher.leases
