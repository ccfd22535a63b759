"""The transport and connections that the scheduler and the worker of a process share."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from kvconnect.address import host_and_port
from kvconnect.config import TransferConfig
from kvconnect.connector.data import KvCachePool, LlmArgs, TransferFailure
from kvconnect.connector.disagg.device import DeviceOrder
from kvconnect.connector.disagg.fetch.claim_book import ClaimBook
from kvconnect.connector.disagg.fetch.fetcher import Fetcher
from kvconnect.connector.disagg.fetch.landing import Landing
from kvconnect.connector.disagg.fetch.part import FetchSettings
from kvconnect.connector.disagg.fetch.sources import address_of_rank
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.connector.disagg.offers import Offers
from kvconnect.connector.disagg.pools import check_pools, peer_heads, peer_layouts, peer_pools
from kvconnect.errors import BadMessage, ConfigurationError, UsageError
from kvconnect.shards import dividing_rank
from kvconnect.trace import metrics
from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.control.description import Compat, PoolInfo
from kvconnect.transfer.control.endpoint import Event, Sender
from kvconnect.transfer.control.messages import Claim, FindDigest, FoundDigest, Unknown
from kvconnect.transfer.digests import LARGEST_DEVICE_NBYTES, can_be_digested, digest_of_pieces
from kvconnect.transfer.node import PeerNode
from kvconnect.transfer.quarantine import Quarantine
from kvconnect.transfer.secret import SharedSecret

# A share of the runtime's deadlines, so that these end first: here it is known which transfers
# still run.
_OWN_SHARE = 0.9
_BLOCK_FORMAT = 1


class TransferNode(PeerNode):
    """An engine among those that exchange KV blocks. Made once per `LlmArgs`.

    The node holds no state of requests. Orders of the scheduler reach the worker in the step's
    metadata. Scheduler and worker use the node of their own process.

    Attributes:
        config: settings.
        layouts: the layouts of the pools that peers read, one per pool group.
        fetcher: the loads from other engines; ``None``: this engine's role has none.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        config = llm_args.kv_connector_config.transfer
        if config is None:
            raise ConfigurationError(
                "KvCacheConnectorConfig: transfer is missing; give transfer=TransferConfig(role=…)"
            )
        if llm_args.pipeline_parallel_size > 1:
            raise ConfigurationError(
                "transfer: pipeline stages are not served; use pipeline_parallel_size=1"
            )
        _, port = host_and_port(config.listen)
        if llm_args.tensor_parallel_size > 1 and config.role != "decode" and not port:
            raise ConfigurationError(
                f"transfer.listen='{config.listen}': with several ranks each listens one port "
                "after the other; give the first one"
            )
        layouts, heads = peer_layouts(llm_args.layouts), peer_heads(llm_args)
        secret = config.secret
        rank, tp_size = dividing_rank(heads)
        super().__init__(
            Compat(
                model=llm_args.model_digest.hex(),
                dtype=str(layouts[0].dtype).removeprefix("torch."),
                num_layers=sum(layout.num_layers for layout in layouts),
                num_kv_heads=heads[0].num_kv_heads,
                key_dim=layouts[0].key_dim,
                value_dim=layouts[0].value_dim,
                block_format=_BLOCK_FORMAT,
                transport=config.transport,
            ),
            listen=address_of_rank(config.listen, llm_args.place.tp_rank if port else 0),
            advertise=config.advertise,
            device=config.device,
            secret=None if secret is None else SharedSecret(secret.get_secret_value()),
            rank=rank,
            tp_size=tp_size,
            accepts=lambda theirs: check_pools(
                self.hello(), theirs, [one.num_kv_heads for one in heads]
            ),
        )
        self.config: TransferConfig = config
        self._llm_args = llm_args
        self.layouts = layouts
        self._heads = heads
        self._users = 0
        self._wakeup: Callable[[], None] = lambda: None
        self._regions: dict[int, Tensor] = {}
        self._offers: Offers | None = None
        self.fetcher: Fetcher | None = None
        self._landing: Landing | None = None
        self._quarantine: Quarantine | None = None
        self._device: DeviceOrder | None = None
        self._hide_gauges: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ its life

    def open(self, pools: Sequence[KvCachePool]) -> None:
        """Registers the pools with the transport, listens, and prepares connections.

        Raises:
            ConfigurationError: the transport cannot be used, or the port cannot be had. Nothing is
                left open once `close` was called.
        """
        pools = peer_pools(pools)
        role, verify = self.config.role, self.config.verify
        self._device = DeviceOrder(pools[0].tensor.device)
        self.transport.open()
        self._regions = {self.transport.register(pool.tensor): pool.tensor for pool in pools}
        self._open_landing(pools)
        self.pools = tuple(
            PoolInfo.of(region, len(pool.tensor), pool.layout)
            for region, pool in zip(self._regions, pools, strict=True)
        )
        if verify == "full" and not all(map(can_be_digested, self._regions.values())):
            raise ConfigurationError(
                f"transfer.verify='full': pools on a device may have {LARGEST_DEVICE_NBYTES} bytes "
                "each at most, as every block is copied to the host for its digest"
            )
        if role != "decode":
            self._open_offers()
        if role != "prefill":
            self._open_fetcher(pools)
        self._hide_gauges = metrics.add_gauges(self._sizes)

    @property
    def overlaps(self) -> bool:
        """Returns whether a request may compute while its prompt is fetched."""
        layouts, connector = self._llm_args.layouts, self._llm_args.kv_connector_config
        one_pool = len(layouts) == 1 and layouts[0].window is None
        wanted = self.config.overlap_fetches and connector.overlap_loads
        return wanted and one_pool and self.config.verify == "none"

    def _open_landing(self, pools: Sequence[KvCachePool]) -> None:
        if self.config.role != "prefill" and self.overlaps:
            memory = Landing.memory_for([one.tensor for one in pools], pools[0].layout.block_nbytes)
            self._landing = Landing(memory, self.transport.register(memory), self._regions)

    def _open_offers(self) -> None:
        config = self.config
        pool_nbytes = sum(one.numel() * one.element_size() for one in self._regions.values())
        most_s = _OWN_SHARE * self._llm_args.kv_connector_config.save_timeout_s
        self._offers = Offers(
            self._wake,
            max_lease_total=config.max_lease_total or pool_nbytes,
            lease_s=min(config.lease_s, most_s),
            max_idle_s=most_s,
            claim_wait_s=config.claim_timeout_s,
            forget=self.transport.drop_digests,
        )
        self.listen(self._deliver)

    def _open_fetcher(self, pools: Sequence[KvCachePool]) -> None:
        config, connector = self.config, self._llm_args.kv_connector_config
        most = int(connector.max_quarantined_fraction * min(len(pool.tensor) for pool in pools))
        self._quarantine = quarantine = Quarantine(max(1, most), self.rebuild)
        self.client.start()
        settings = FetchSettings(
            layouts=self.layouts,
            pools=self._regions,
            load_s=_OWN_SHARE * connector.load_timeout_s,
            idle_s=config.claim_timeout_s,
            min_bytes_per_s=config.min_bytes_per_s,
            verify=config.verify == "full",
        )
        claims = ClaimBook(self.client, self.peers, self._heads)
        self.fetcher = Fetcher(
            self.transport, claims, settings, quarantine=quarantine, landing=self._landing
        )

    def _sizes(self) -> dict[str, float]:
        """Returns the gauges of this node."""
        found: dict[str, float] = {}
        if (offers := self._offers) is not None:
            found["transfer.peers.readers"] = self.readers
            found["transfer.leased_bytes"] = offers.server.table.total_nbytes
        if (quarantine := self._quarantine) is not None:
            found["transfer.peers.sources"] = self.peers.connected
            found["transfer.quarantined_blocks"] = quarantine.quarantined
        return found

    def close(self) -> None:
        """Closes all connections; idempotent.

        Blocks until the transport no longer accesses the pools. Their memory is not kept then.
        """
        self._hide_gauges()
        if self.fetcher is not None:
            self.fetcher.close()
        super().close()
        if self._offers is not None:
            self._offers.server.close(tuple(self._regions.values()))
        if self._device is not None:
            self._device.close()
        # Connections and claims call back, and so keep this node until Python searches for circles.
        self._regions.clear()
        self._landing = None

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Sets `wakeup`, which is called on any thread when a load or a lease ended."""
        self._wakeup = wakeup

    def _wake(self) -> None:
        self._wakeup()

    # ------------------------------------------------------------------ what it is used for

    def new_transfer_id(self) -> str:
        """Returns an id that no other prompt of any engine has."""
        return f"{self.engine_id}-{secrets.token_hex(8)}"

    @property
    def offers(self) -> Offers:
        """The prompts that other engines may read."""
        if self._offers is None:
            raise UsageError(
                "transfer: this engine publishes no prompts; give role='prefill' or 'both'"
            )
        return self._offers

    @property
    def hands_out(self) -> bool:
        """Returns whether other engines may read prompts from this engine."""
        return self._offers is not None

    @property
    def device(self) -> DeviceOrder:
        """Runs calls, in order, after the device's work at their time; made on first use."""
        if self._device is None:
            raise UsageError("register_kv_caches was not called")
        return self._device

    def keep_digests(self, epoch: int, blocks: Sequence[Sequence[int]]) -> None:
        """Lets the transport digest blocks, by pool group, before they are read.

        The blocks do not change until the lease `epoch` ends. Does not block.
        """
        for region, layout, ids in zip(self._regions, self.layouts, blocks, strict=True):
            offsets = np.array(ids, np.int64) * layout.block_nbytes
            self.transport.keep_digests(region, offsets, layout.block_nbytes, epoch=epoch)

    def claim(self, address: str, name: str, tp_size: int = 1) -> list[Claimed]:
        """Claims a prompt from the engine at `address`; see `ClaimBook.claim_all`."""
        return self._fetching.claims.claim_all(address, name, tp_size)

    def fetch(
        self,
        order: FetchOrder,
        done: Callable[[int, TransferFailure | None], None],
        news: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins a load after the work that the device still does with its blocks."""
        fetcher = self._fetching
        fetcher.expect(order, done, news)
        self.device.after(lambda: fetcher.begin(order))

    @property
    def _fetching(self) -> Fetcher:
        if self.fetcher is None:
            raise UsageError(
                "transfer: this engine fetches no prompts; give role='decode' or 'both'"
            )
        return self.fetcher

    # ------------------------------------------------------------------ messages of peers

    def _deliver(self, channel: Sender, event: Event) -> None:
        """Handles a message or a change of a reader's connection; on the channel's thread."""
        if isinstance(event, Claim) and self.offers.is_gone(event.request):
            channel.send(Unknown(seq=event.seq, request=event.request, epoch=event.epoch))
        elif isinstance(event, FindDigest):
            channel.send(self._digest_of(event))
        else:
            self.offers.server.deliver(channel, event)

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
            node = _nodes.get(id(llm_args))
            if node is None:
                node = _nodes[id(llm_args)] = cls(llm_args)
            node._users += 1
            return node

    def release(self) -> None:
        """Removes one user; the last one closes the node."""
        with _lock:
            self._users -= 1
            if self._users:
                return
            del _nodes[id(self._llm_args)]
        self.close()


# Each node keeps its `LlmArgs`, whose id no other gets meanwhile.
_nodes: dict[int, TransferNode] = {}
_lock = threading.Lock()
