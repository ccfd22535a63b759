"""Destinations of reads that failed and may still be written to."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from kvconnect.errors import KvConnectError
from kvconnect.trace import count, warn_once
from kvconnect.transfer.transport import PeerHandle, Pull

_GRACE_S = 0.5
_AGAIN_S, _AGAIN_AT_LAST_S = 0.2, 10.0


class Quarantine:
    """Counts blocks until the pull that was to fill them is terminal, and bounds their number.

    At `max_quarantined` blocks, no read begins from peers that hold some of them. If that lasts,
    `rebuild` runs on a thread of its own until it succeeds. Then every pull is terminal, and the
    kept blocks are freed. A rebuild ends the reads from all peers, so it comes last: most pulls are
    terminal a moment after they were abandoned. Thread-safe; no method blocks.

    Args:
        max_quarantined: blocks; at least 1.
        rebuild: calls `Transport.rebuild` and makes peers connect again; may block.
    """

    def __init__(self, max_quarantined: int, rebuild: Callable[[], None]) -> None:
        self._max = max_quarantined
        self._rebuild = rebuild
        self._changed = threading.Condition()
        self._blocks: Counter[str] = Counter()
        self._watched = False  # a thread waits for blocks to be freed, or rebuilds
        self._rebuilding = False

    def hold(self, pull: Pull, peer: PeerHandle, blocks: int) -> None:
        """Counts `blocks` of `peer` until `pull` is terminal."""
        with self._changed:
            self._blocks[peer.identity] += blocks
        count("transfer.quarantined", blocks=blocks)
        pull.terminal.add_callback(lambda: self._end(peer.identity, blocks))
        self._bound()

    @property
    def quarantined(self) -> int:
        """The number of blocks that are kept now."""
        with self._changed:
            return self._blocks.total()

    def share(self, part: float) -> int:
        """Returns the number of blocks that is `part` of `max_quarantined`, at least 1."""
        return max(1, int(part * self._max))

    def accepts(self, peer: PeerHandle) -> bool:
        """Returns whether reads from `peer` may begin."""
        with self._changed:
            over = not self._below()
            return not self._rebuilding and not (over and self._blocks[peer.identity])

    def _end(self, identity: str, blocks: int) -> None:
        with self._changed:
            self._blocks[identity] -= blocks
            if not self._blocks[identity]:
                del self._blocks[identity]
            self._changed.notify_all()

    def _below(self) -> bool:
        return self._blocks.total() < self._max

    def _bound(self) -> None:
        with self._changed:
            if self._watched or self._below():
                return
            self._watched = True
        thread = threading.Thread(target=self._run, name="kvconnect-rebuild", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started: the next `hold` tries again
            warn_once("rebuild thread", f"the transport cannot be built anew: {error}")
            with self._changed:
                self._watched = False

    def _run(self) -> None:
        with self._changed:
            if self._changed.wait_for(self._below, _GRACE_S):
                self._watched = False
                return
        pause_s = _AGAIN_S
        try:
            # A failed rebuild may have ended all reads and left a transport that begins none.
            while not self._rebuilt():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_AT_LAST_S)
        finally:
            with self._changed:
                self._watched = False

    def _rebuilt(self) -> bool:
        count("transfer.rebuilds")
        with self._changed:
            self._rebuilding = True
        try:
            self._rebuild()
        except KvConnectError as error:
            warn_once(f"rebuild {type(error)}", f"the transport cannot be built anew: {error}")
            return False
        finally:
            with self._changed:
                self._rebuilding = False
        return True
