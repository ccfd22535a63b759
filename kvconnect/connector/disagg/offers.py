"""Prompts that peers may read, and whose blocks are kept for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvconnect.connector.disagg.names import transfer_id_of
from kvconnect.errors import OutOfBlocks
from kvconnect.trace import warn_once
from kvconnect.transfer.control.messages import LeaseId, Watermark
from kvconnect.transfer.leases.server import LeaseServer
from kvconnect.transfer.leases.table import Blocks, Ended

__all__ = ["Offers"]

_REMEMBERED = 4096


class Offers:
    """The lease server as the engine's side uses it: what ended is posted, and the engine woken.

    Args:
        wakeup: called on any thread when `take_ended` has news.
        max_lease_total: bytes of blocks that are kept for peers, at most.
        lease_s, max_idle_s, claim_wait_s: as `LeaseServer`.
    """

    def __init__(
        self,
        wakeup: Callable[[], None],
        *,
        max_lease_total: int,
        lease_s: float,
        max_idle_s: float,
        claim_wait_s: float,
    ) -> None:
        self._wakeup = wakeup
        self._lock = threading.Lock()
        self._kept: dict[LeaseId, int] = {}
        self._ended: list[int] = []
        # By name: more than one if its prompt is computed several times.
        self._offered: dict[str, set[LeaseId]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._transfers: OrderedDict[str, str] = OrderedDict()  # the last prompt of each
        self.server = LeaseServer(
            self._unpinned,
            max_lease_total=max_lease_total,
            lease_s=lease_s,
            max_idle_s=max_idle_s,
            claim_wait_s=claim_wait_s,
        )
        self.server.start()

    def offer(self, name: str, *, tokens: int, nbytes: int) -> LeaseId | None:
        """`name` may be claimed from now on; ``None``: too much is handed out."""
        try:
            # It may end at once, and that must not be noted before its beginning is.
            with self._lock:
                key = self.server.offer(name, tokens=tokens, nbytes=nbytes)
                self._offered.setdefault(name, set()).add(key)
                self._gone.pop(name, None)
                self._transfers[transfer_id_of(name)] = name
                if len(self._transfers) > _REMEMBERED:
                    self._transfers.popitem(last=False)
        except OutOfBlocks as error:
            warn_once("transfer.offer", f"a prompt is not handed out: {error}")
            self.refuse(name)
            return None
        return key

    def is_gone(self, name: str) -> bool:
        """Whether `name` was handed out, or is not going to be: no peer need wait for it."""
        with self._lock:
            if name in self._offered:
                return False
            # Of one transfer there is one prompt: a reader that has another one need not wait.
            return name in self._gone or self._transfers.get(transfer_id_of(name), name) != name

    def advance(self, key: LeaseId, mark: Watermark, blocks: Blocks) -> bool:
        """More of it is computed; False: no peer reads it any more."""
        alive = self.server.advance(key, mark, blocks)
        if not alive:
            self._let_go([key])
        return alive

    def withdraw(self, key: LeaseId) -> None:
        """Nothing more of it is computed, or its blocks go."""
        self.server.withdraw(key, "its blocks are gone")

    def refuse(self, name: str) -> None:
        """`name` will not be handed out: peers that wait for it are told.

        Unless it is handed out for another request.
        """
        with self._lock:
            if name in self._offered:
                return
            self._note_gone(name)
        self.server.withdraw(self.server.offer(name, tokens=1, nbytes=0), "it is not handed out")

    def end(self, request_id: int, key: LeaseId | None) -> None:
        """The request ended, and its blocks are kept while the lease `key` lives."""
        with self._lock:
            if key is not None:
                self._kept[key] = request_id
                return
            self._ended.append(request_id)
        self._wakeup()

    def take_ended(self) -> list[int]:
        """Requests whose blocks are kept for no peer any more, each once."""
        if not self._ended:
            return []
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self, memory: object = None) -> None:
        """Peers are answered no more, and leases end no more; `memory` lives until they would."""
        self.server.close(memory)

    def _unpinned(self, ended: Sequence[Ended]) -> None:
        """On the lease server's thread."""
        with self._lock:
            for one in ended:
                same = self._offered.get(one.key.request, set())
                if one.key in same:
                    same.remove(one.key)
                    if not same:
                        del self._offered[one.key.request]
                        self._note_gone(one.key.request)
        self._let_go([one.key for one in ended])

    def _note_gone(self, name: str) -> None:
        self._gone[name] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def _let_go(self, keys: Sequence[LeaseId]) -> None:
        with self._lock:
            mine = [self._kept.pop(key) for key in keys if key in self._kept]
            self._ended += mine
        if mine:
            self._wakeup()
