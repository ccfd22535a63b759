"""A pull over NIXL: transfers that one agent or several take one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvconnect.errors import PullFailed
from kvconnect.transfer.nixl.pull_part import PullPart
from kvconnect.transfer.nixl.transfers import Transfer
from kvconnect.transfer.pull import Pull

__all__ = ["NixlPull"]


class NixlPull(Pull):
    """A read of one peer, by one agent or by several side by side. Thread-safe.

    The pull ends when all of its parts have ended, even if one failed: until then another part may
    still write. A failed part stops the others. The first part joins before `add`.

    Attributes:
        stopped: no further transfer begins.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.stopped = False
        self._transfers: deque[Transfer] = deque()
        self._parts: tuple[PullPart, ...] = ()
        self._open = 0
        self._error: PullFailed | None = None

    def join(self, part: PullPart) -> bool:
        """Adds `part`, which may take transfers from now on; False if the pull has ended."""
        with self._lock:
            if self._parts and not self._open:
                return False
            self._parts = (*self._parts, part)
            self._open += 1
        return True

    def add(self, transfers: Iterable[Transfer]) -> int:
        """Adds transfers and returns how many there are. Call it before a part is advanced."""
        self._transfers.extend(transfers)
        return len(self._transfers)

    def take(self) -> Transfer | None:
        """Returns the next transfer, for one part only; ``None`` at the end or if stopped."""
        if self.stopped:
            return None
        try:
            return self._transfers.popleft()
        except IndexError:
            return None

    def part_failed(self, error: PullFailed) -> None:
        """Stops the pull after a part failed. `done` fails when all parts have ended."""
        with self._lock:
            self._error = self._error or error
        self._stop()

    def part_ended(self) -> None:
        """Records that no byte of a part lands any more. Called once for each part."""
        with self._lock:
            self._open -= 1
            last = not self._open
        if last:
            self.finish(self._error)

    def _stop(self) -> None:
        self.stopped = True
        for part in self._parts:
            part.wake()
