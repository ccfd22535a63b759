"""A pull over TCP, and its shares, each of which one lane reads."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from itertools import pairwise

from kvconnect.errors import PullFailed
from kvconnect.transfer.acceptor import shut
from kvconnect.transfer.pull import Pull
from kvconnect.transfer.reads import Reads, Runs, cut, runs

_SHARE_NBYTES = 8 << 20
"""A pull is spread over several connections only in shares of at least this size."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A part of a pull that one connection reads: as many remote bytes as local ones.

    `epoch` is that of the pull's `Reads`.
    """

    pull: TcpPull
    remote_region: int
    remote: Runs
    local_region: int
    local: Runs
    epoch: int


class TcpPull(Pull):
    """A pull whose shares are waiting, running (with their connection) or ended.

    `terminal` is set when no share is running or may begin. If the pull is stopped, waiting shares
    end at once, and the connections of running ones are shut down.

    Attributes:
        stopped: whether the pull is stopped: no share begins, and running ones end soon.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._shares_lock = threading.Lock()
        self._waiting: set[Share] = set()
        self._running: dict[Share, socket.socket] = {}
        self.stopped = False
        self._error: PullFailed | None = None

    def expect(self, shares: list[Share]) -> None:
        """Sets the shares of the pull, before a lane gets one; finishes a pull without shares."""
        self._waiting = set(shares)
        if not shares:
            self.finish()

    def begin(self, share: Share, connection: socket.socket) -> bool:
        """Marks `share` as running over `connection`; returns False if the pull is stopped.

        In both cases, the lane calls `end` later.
        """
        with self._shares_lock:
            if self.stopped:
                return False
            self._waiting.discard(share)
            self._running[share] = connection
            return True

    def end(self, share: Share, error: PullFailed | None = None) -> None:
        """Records that no byte of `share` lands any more; an `error` stops the other shares."""
        with self._shares_lock:
            self._waiting.discard(share)
            self._running.pop(share, None)
            self._error = self._error or error
        if error is not None:
            self._stop()
        else:
            self._finish_if_last()

    def _stop(self) -> None:
        with self._shares_lock:
            self.stopped = True
            self._waiting.clear()
            for connection in self._running.values():
                shut(connection)
        self._finish_if_last()

    def _finish_if_last(self) -> None:
        with self._shares_lock:
            last = not self._waiting and not self._running
        if last:
            self.finish(self._error)


def split(pull: TcpPull, reads: Reads, most: int) -> list[Share]:
    """Cuts `reads` into up to `most` shares of `pull` of about equal size.

    Several shares have at least 8 MiB each. Pieces stay whole unless there are fewer than shares.
    Without bytes to read there is no share.
    """
    total = reads.total_nbytes
    number = max(1, min(most, total // _SHARE_NBYTES))
    remote = runs(reads.remote_offsets, reads.nbytes)
    local = runs(reads.local_offsets, reads.nbytes)
    regions = reads.remote_region, reads.local_region
    if number == 1 and total:
        return [Share(pull, regions[0], remote, regions[1], local, reads.epoch)]
    unit = reads.nbytes if len(reads.local_offsets) >= number else 1
    ends = [total // unit * index // number * unit for index in range(number + 1)] if total else []
    return [
        Share(
            pull,
            regions[0],
            cut(remote, begin, end),
            regions[1],
            cut(local, begin, end),
            reads.epoch,
        )
        for begin, end in pairwise(ends)
    ]
