"""The published prompts, whose blocks are kept for peers to read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvconnect.connector.disagg.params import transfer_id_of
from kvconnect.errors import OutOfBlocks
from kvconnect.trace import warn_once
from kvconnect.transfer.control.messages import LeaseId, Watermark
from kvconnect.transfer.leases.lease import Blocks
from kvconnect.transfer.leases.server import LeaseServer

_REMEMBERED = 4096


class Offers:
    """The published prompts on their lease server. Wakes the engine when leases end.

    Args:
        wakeup: called on any thread when `take_ended` has something to return.
        max_lease_total: the most bytes of blocks that are kept for peers.
        lease_s, max_idle_s, claim_wait_s: see `LeaseServer`.
        forget: called with the epoch of each lease that ended, before its blocks are freed.
    """

    def __init__(
        self,
        wakeup: Callable[[], None],
        *,
        max_lease_total: int,
        lease_s: float,
        max_idle_s: float,
        claim_wait_s: float,
        forget: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._wakeup = wakeup
        self._forget = forget
        self._lock = threading.Lock()
        self._kept: dict[LeaseId, int] = {}
        self._ended: list[int] = []
        self._transfers: OrderedDict[str, str] = OrderedDict()  # the last prompt of each transfer
        self.server = LeaseServer(
            lambda ended: self._let_go([one.key for one in ended]),
            max_lease_total=max_lease_total,
            lease_s=lease_s,
            max_idle_s=max_idle_s,
            claim_wait_s=claim_wait_s,
        )
        self.server.start()

    def offer(self, name: str, *, tokens: int, nbytes: int) -> LeaseId | None:
        """Publishes `name`, so that peers may claim it.

        Returns the key of its lease; ``None`` if too many bytes are leased already.
        """
        with self._lock:
            self._transfers[transfer_id_of(name)] = name
            if len(self._transfers) > _REMEMBERED:
                self._transfers.popitem(last=False)
        try:
            return self.server.offer(name, tokens=tokens, nbytes=nbytes)
        except OutOfBlocks as error:
            warn_once("transfer.offer", f"a prompt is not handed out: {error}")
            self.refuse(name)
            return None

    def is_gone(self, name: str) -> bool:
        """Returns whether `name` will not be published any more, so that peers need not wait."""
        offered = self.server.table.is_offered(name)
        if offered is not None:
            return not offered
        with self._lock:
            # A transfer has one prompt: a reader with another prompt need not wait.
            return self._transfers.get(transfer_id_of(name), name) != name

    def advance(self, key: LeaseId, mark: Watermark, blocks: Blocks) -> bool:
        """Reports that more of the prompt is computed; returns False if its lease has ended."""
        alive = self.server.advance(key, mark, blocks)
        if not alive:
            self._let_go([key])
        return alive

    def withdraw(self, key: LeaseId) -> None:
        """Ends a lease whose blocks are freed, or whose prompt is not computed further."""
        self.server.withdraw(key, "its blocks are gone")

    def refuse(self, name: str) -> None:
        """Fails the claims of peers that wait for `name`, which will not be published.

        Does nothing if `name` is published for another request.
        """
        if not self.server.table.is_offered(name):
            key = self.server.offer(name, tokens=1, nbytes=0)
            self.server.withdraw(key, "it is not handed out")

    def end(self, request_id: int, key: LeaseId | None) -> None:
        """Records that the request ended; its blocks are kept while the lease `key` lives.

        Without `key`, the next `take_ended` returns the request.
        """
        with self._lock:
            if key is not None:
                self._kept[key] = request_id
                return
            self._ended.append(request_id)
        self._wakeup()

    def take_ended(self) -> list[int]:
        """Returns requests whose blocks are no longer kept for any peer, each once."""
        if not self._ended:
            return []
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def _let_go(self, keys: Sequence[LeaseId]) -> None:
        for key in keys:
            self._forget(key.epoch)
        with self._lock:
            mine = [self._kept.pop(key) for key in keys if key in self._kept]
            self._ended += mine
        if mine:
            self._wakeup()
