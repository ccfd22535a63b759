"""The claims that requests of this engine hold on other engines' blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvconnect.address import host_and_port
from kvconnect.connector.disagg.fetch.sources import Source, address_of_rank, sources
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.errors import ConfigurationError, DuplicateRequest, RetryLater
from kvconnect.shards import StoredHeads
from kvconnect.transfer.claimed import Claimed
from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.peers import Peers


class ClaimBook:
    """The claims by name and address, one for each. Thread-safe; no method blocks.

    Args:
        client: the client that asks for leases.
        peers: the connections to other engines.
        heads: the KV heads of the model that this rank has, for each pool group.

    Attributes:
        client, heads: the arguments.
    """

    def __init__(self, client: LeaseClient, peers: Peers, heads: Sequence[StoredHeads]) -> None:
        self.client = client
        self._peers = peers
        self.heads = heads
        self._lock = threading.Lock()
        self._claims: dict[tuple[str, str], Claimed] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def claim_all(self, address: str, name: str, tp_size: int) -> list[Claimed]:
        """Returns claims on all ranks of the engine at `address` that this rank reads from.

        Raises:
            ConfigurationError: the heads cannot be spread over `tp_size` ranks.
        """
        wanted = [
            (address_of_rank(address, one.rank), one.readers)
            for one in sources(self.heads, tp_size)
        ]
        return [self.claim(where, name, readers) for where, readers in wanted]

    def claim(self, address: str, name: str, readers: int = 1) -> Claimed:
        """Claims `name` from the rank at `address`, from which `readers` ranks of this engine read.

        Never raises.
        """
        with self._lock:  # the client drops a refused claim before this does
            if (address, name) in self._claims:
                return Claimed.refused(address, name, "it is fetched for another request")
        try:
            link = self._peers.use(address)
        except (ConfigurationError, RetryLater) as error:
            return Claimed.refused(address, name, str(error))
        try:
            claimed = self.client.claim(address, name, readers=readers)
        except DuplicateRequest as error:
            self._peers.leave(link)
            return Claimed.refused(address, name, str(error))
        claimed.attach(link, self._dropped)
        with self._lock:
            self._claims[address, name] = claimed
        return claimed

    def of(self, order: FetchOrder, source: Source) -> Claimed | None:
        """Returns the claim for one part of the load `order`, or ``None``.

        On a rank without a scheduler this makes the claim.
        """
        address = address_of_rank(order.address, source.rank)
        with self._lock:
            found = self._claims.get((address, order.name))
        if found is None and self.heads[0].shard.tp_rank:
            found = self.claim(address, order.name, source.readers)
        return found

    def drop(self, order: FetchOrder) -> None:
        """Drops the claims made for `order`, on every rank of the other engine."""
        host, first = host_and_port(order.address)
        for claim in self._all():
            where, port = host_and_port(claim.peer)
            same = (claim.lease.request, where) == (order.name, host)
            if same and 0 <= port - first < order.tp_size:
                claim.drop()

    def drop_all(self) -> None:
        """Drops every claim."""
        for claim in self._all():
            claim.drop()

    def _all(self) -> list[Claimed]:
        with self._lock:
            return list(self._claims.values())

    def _dropped(self, claim: Claimed) -> None:
        self.client.abort(claim, "not needed")
        with self._lock:
            del self._claims[claim.peer, claim.lease.request]
        if claim.link is not None:
            self._peers.leave(claim.link)
