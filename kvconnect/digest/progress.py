"""Logs the progress of long digests."""

from __future__ import annotations

import logging
import time

__all__ = ["Progress"]

logger = logging.getLogger("kvconnect.digest")

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Logs how far a digest is, every 5 seconds.

    Args:
        total: in bytes.
        what: is hashed, such as "weights".
    """

    def __init__(self, total: int, what: str = "weights") -> None:
        self._total = total
        self._what = what
        self._done = 0
        self._told_at = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Adds `nbytes` to the hashed bytes."""
        self._done += nbytes
        now = time.monotonic()
        if now - self._told_at >= _SECONDS_BETWEEN_LINES:
            self._told_at = now
            done, total = self._done / 2**30, self._total / 2**30
            logger.info("digest of the %s: %.1f of %.1f GiB read", self._what, done, total)
