"""The transport and connections that the scheduler and the worker of a process share."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from kvconnect.address import host_and_port
from kvconnect.config import TransferConfig
from kvconnect.connector.data import KvCachePool, LlmArgs, TransferFailure
from kvconnect.connector.disagg.device import DeviceOrder
from kvconnect.connector.disagg.fetch.fetcher import Fetcher
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.connector.disagg.offers import Offers
from kvconnect.connector.disagg.pools import check_pools
from kvconnect.errors import BadMessage, ConfigurationError, UsageError
from kvconnect.shards import dividing_rank
from kvconnect.trace import metrics
from kvconnect.transfer.choose import transport_of
from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.control.description import Compat, PoolInfo
from kvconnect.transfer.control.digests import FindDigest, FoundDigest
from kvconnect.transfer.control.endpoint import Endpoint, Timing
from kvconnect.transfer.control.events import Connected, Disconnected, Event, Sender
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.messages import Claim, Hello, Unknown
from kvconnect.transfer.digests import (
    LARGEST_DEVICE_NBYTES,
    can_be_digested,
    digest_of_pieces,
)
from kvconnect.transfer.leases.server import Send
from kvconnect.transfer.peers import Peers
from kvconnect.transfer.quarantine import Quarantine
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.transport import Transport

__all__ = ["TransferNode"]

# A share of the runtime's own deadlines: these end first, where it is known what still runs.
_OWN_SHARE = 0.9
_BLOCK_FORMAT = 1


class TransferNode:
    """An engine among those that exchange KV blocks. Made once per `LlmArgs`.

    The node holds no state of requests. Orders of the scheduler reach the worker in the step's
    metadata. Scheduler and worker use the node of their own process.

    Attributes:
        config: settings.
        engine_id: of this incarnation of this engine.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        config = llm_args.kv_connector_config.transfer
        if config is None:
            raise ConfigurationError("KvCacheConnectorConfig: transfer is needed")
        if llm_args.pipeline_parallel_size > 1:
            raise ConfigurationError("transfer: pipeline stages are not served")
        _, port = host_and_port(config.listen)
        if llm_args.tensor_parallel_size > 1 and config.role != "decode" and not port:
            raise ConfigurationError(
                f"transfer.listen='{config.listen}': with several ranks each listens one port "
                "after the other; give the first one"
            )
        self.config: TransferConfig = config
        self._heads = llm_args.stored_heads
        self.engine_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._llm_args = llm_args
        self._boot = secrets.token_bytes(16)
        secret = config.secret
        self._secret = None if secret is None else SharedSecret(secret.get_secret_value())
        self._wakeup: Callable[[], None] = lambda: None
        self._pools: tuple[PoolInfo, ...] = ()
        self._memory: tuple[Tensor, ...] = ()
        self._regions: dict[int, Tensor] = {}
        self._transport: Transport | None = None
        self._listener: Listener | None = None
        self._peers: Peers | None = None
        self._offers: Offers | None = None
        self._fetcher: Fetcher | None = None
        self._quarantine: Quarantine | None = None
        self._device: DeviceOrder | None = None
        self._hide_gauges: Callable[[], None] = lambda: None
        self._ways: dict[Sender, tuple[str, Send]] = {}

    # ------------------------------------------------------------------ its life

    def open(self, pools: Sequence[KvCachePool]) -> None:
        """Registers the pools, listens, and prepares connections.

        Raises:
            ConfigurationError: the transport cannot be used, or the port cannot be had. Nothing is
                left open once `close` was called.
        """
        config = self.config
        self._device = DeviceOrder(pools[0].tensor.device)
        self._transport = transport = self._make_transport()
        transport.open()
        self._memory = tuple(pool.tensor for pool in pools)
        regions = [transport.register(memory) for memory in self._memory]
        self._pools = tuple(
            PoolInfo.of(region, len(pool.tensor), pool.layout)
            for region, pool in zip(regions, pools, strict=True)
        )
        if config.verify == "full" and not all(map(can_be_digested, self._memory)):
            raise ConfigurationError(
                f"transfer.verify='full': pools on a device may have {LARGEST_DEVICE_NBYTES} bytes "
                "each at most, as every block is copied to the host for its digest"
            )
        self._regions = dict(zip(regions, self._memory, strict=True))
        if config.role != "decode":
            self._open_offers()
        if config.role != "prefill":
            self._quarantine = Quarantine(self._max_quarantined(pools), self._rebuild)
            self._open_fetcher(transport, regions, self._quarantine)
        self._hide_gauges = metrics.add_gauges(self._sizes)

    def _open_offers(self) -> None:
        config, connector = self.config, self._llm_args.kv_connector_config
        pool_nbytes = sum(memory.numel() * memory.element_size() for memory in self._memory)
        most_s = _OWN_SHARE * connector.save_timeout_s
        self._offers = Offers(
            self._wake,
            max_lease_total=config.max_lease_total or pool_nbytes,
            lease_s=min(config.lease_s, most_s),
            max_idle_s=most_s,
            claim_wait_s=config.claim_timeout_s,
        )
        host, port = host_and_port(config.listen)
        endpoint = Endpoint(self._hello, self._deliver, self._secret, Timing())
        if port:
            port += self._llm_args.place.tp_rank
        self._listener = Listener(endpoint, host, port)

    def _open_fetcher(
        self, transport: Transport, regions: list[int], quarantine: Quarantine
    ) -> None:
        config = self.config
        self._fetcher = fetcher = Fetcher(
            transport,
            layouts=self._llm_args.layouts,
            regions=regions,
            load_s=_OWN_SHARE * self._llm_args.kv_connector_config.load_timeout_s,
            idle_s=config.claim_timeout_s,
            min_bytes_per_s=config.min_bytes_per_s,
            quarantine=quarantine,
            heads=self._heads,
            verified=self._regions if config.verify == "full" else None,
        )
        self._peers = Peers(
            self._hello,
            transport,
            fetcher.client.deliver,
            secret=self._secret,
            timing=Timing(),
            accepts=self._check_pools,
        )
        fetcher.claims.attach(self._peers)

    def _sizes(self) -> dict[str, float]:
        """Returns the gauges of this node."""
        found: dict[str, float] = {}
        if (listener := self._listener) is not None:
            found["transfer.peers.readers"] = len(listener.channels())
        if (offers := self._offers) is not None:
            found["transfer.leased_bytes"] = offers.server.table.total_nbytes
        if (peers := self._peers) is not None:
            found["transfer.peers.sources"] = peers.connected
        if (quarantine := self._quarantine) is not None:
            found["transfer.quarantined_blocks"] = quarantine.quarantined
        return found

    def _max_quarantined(self, pools: Sequence[KvCachePool]) -> int:
        fraction = self._llm_args.kv_connector_config.max_quarantined_fraction
        return max(1, int(fraction * min(len(pool.tensor) for pool in pools)))

    def _rebuild(self) -> None:
        """Restarts the transport, so that no earlier read writes any more. Blocks."""
        if (transport := self._transport) is not None:
            transport.rebuild()
        # Both the readers and the engines read from have to learn of the new one.
        if (listener := self._listener) is not None:
            for channel in listener.channels():
                channel.close("the transport was rebuilt")
        if (peers := self._peers) is not None:
            peers.reconnect("the transport was rebuilt")

    def close(self) -> None:
        """Closes all connections; idempotent. Blocks until the transport leaves the pools alone."""
        self._hide_gauges()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if self._fetcher is not None:
            self._fetcher.close()
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if self._offers is not None:
            self._offers.close(self._memory)
        if self._device is not None:
            self._device.close()

    def _make_transport(self) -> Transport:
        config = self.config
        return transport_of(
            config.transport,
            self.engine_id,
            listen=config.listen,
            advertise=config.advertise,
            device=config.device,
            secret=self._secret,
        )

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Sets `wakeup`, which is called on any thread when a load or a lease ended."""
        self._wakeup = wakeup

    def _wake(self) -> None:
        self._wakeup()

    # ------------------------------------------------------------------ what it is used for

    @property
    def address(self) -> str:
        """The address, ``host:port``, at which other engines reach this engine's first rank."""
        if self._listener is None:
            raise UsageError("the engine hands out nothing")
        return self._listener.address(self.config.advertise)

    def new_transfer_id(self) -> str:
        """Returns an id that no other prompt of any engine has."""
        return f"{self.engine_id}-{secrets.token_hex(8)}"

    @property
    def offers(self) -> Offers:
        """The prompts that other engines may read."""
        if self._offers is None:
            raise UsageError("the engine hands out nothing")
        return self._offers

    @property
    def hands_out(self) -> bool:
        """Returns whether other engines may read prompts from this one."""
        return self._offers is not None

    @property
    def fetcher(self) -> Fetcher | None:
        """The loads from other engines; ``None``: this engine's role has none."""
        return self._fetcher

    @property
    def device(self) -> DeviceOrder:
        """The calls that run after the device's work so far."""
        if self._device is None:
            raise UsageError("register_kv_caches was not called")
        return self._device

    def claim(self, address: str, name: str, tp_size: int = 1) -> list[Claimed]:
        """Claims a prompt from the engine at `address`; see `ClaimBook.claim_all`."""
        if self._fetcher is None:
            return [Claimed.refused(address, name, "this engine fetches nothing")]
        return self._fetcher.claims.claim_all(address, name, tp_size)

    def fetch(self, order: FetchOrder, done: Callable[[int, TransferFailure | None], None]) -> None:
        """Begins a load after the work that the device still does with its blocks."""
        fetcher = self._fetcher
        if fetcher is None:
            raise UsageError("this engine fetches nothing")
        fetcher.expect(order, done)
        self.device.after(lambda: fetcher.begin(order))

    # ------------------------------------------------------------------ what others hear and say

    def _hello(self) -> Hello:
        transport = self._transport
        layouts = self._llm_args.layouts
        rank, tp_size = dividing_rank(self._heads)
        return Hello(
            compat=Compat(
                model=self._llm_args.model_digest.hex(),
                dtype=str(layouts[0].dtype).removeprefix("torch."),
                num_layers=sum(layout.num_layers for layout in layouts),
                num_kv_heads=self._heads[0].num_kv_heads,
                key_dim=layouts[0].key_dim,
                value_dim=layouts[0].value_dim,
                block_format=_BLOCK_FORMAT,
                transport=self.config.transport,
            ),
            engine_id=self.engine_id,
            boot=self._boot,
            rank=rank,
            tp_size=tp_size,
            local=b"" if transport is None else transport.local(),
            pools=self._pools,
        )

    def _check_pools(self, theirs: Hello) -> None:
        check_pools(self._hello(), theirs, [one.num_kv_heads for one in self._heads])

    def _deliver(self, channel: Sender, event: Event) -> None:
        """Handles a message or a change of a reader's connection; on the channel's thread."""
        server = self.offers.server
        if isinstance(event, Connected):
            self._ways[channel] = holder, send = event.hello.holder, channel.send
            server.connected(holder, send)
        elif isinstance(event, Disconnected):
            server.disconnected(*self._ways.pop(channel))
        elif isinstance(event, Claim) and self.offers.is_gone(event.request):
            channel.send(Unknown(seq=event.seq, request=event.request, epoch=event.epoch))
        elif isinstance(event, FindDigest):
            channel.send(self._digest_of(event))
        else:
            server.handle(event, *self._ways[channel])

    def _digest_of(self, asked: FindDigest) -> FoundDigest:
        memory, digest = self._regions.get(asked.region), None
        if memory is not None and can_be_digested(memory):
            try:
                digest = digest_of_pieces(memory, asked.offsets, asked.nbytes)
            except ValueError as error:
                raise BadMessage(f"FindDigest.offsets: {error}") from error
        return FoundDigest(seq=asked.seq, digest=digest)

    # ------------------------------------------------------------------ one per LlmArgs

    @classmethod
    def acquire(cls, llm_args: LlmArgs) -> TransferNode:
        """Returns the node of `llm_args`; every caller calls `release` once.

        Raises:
            ConfigurationError: a setting is wrong.
        """
        with _lock:
            entry = _nodes.get(id(llm_args))
            if entry is None:
                entry = _nodes[id(llm_args)] = _Entry(cls(llm_args))
            entry.users += 1
            return entry.node

    def release(self) -> None:
        """Removes one user; the last one closes the node."""
        with _lock:
            entry = _nodes[id(self._llm_args)]
            entry.users -= 1
            if entry.users:
                return
            del _nodes[id(self._llm_args)]
        self.close()


class _Entry:
    __slots__ = ("node", "users")

    def __init__(self, node: TransferNode) -> None:
        self.node = node  # and with it its llm_args, whose id no other gets meanwhile
        self.users = 0


_nodes: dict[int, _Entry] = {}
_lock = threading.Lock()
