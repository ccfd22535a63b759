"""One load whose bytes come from several ranks of another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvconnect.connector.disagg.fetch.load import Fetch
    from kvconnect.connector.disagg.messages import FetchOrder

__all__ = ["JoinedFetch"]


class JoinedFetch:
    """What is fetched from each rank: valid together or not at all. The fetcher's thread's.

    Attributes:
        order: what is loaded.
        parts: one for each rank that is read from.
        reason: why it failed; ``None``: it has not.
        cancelled: no request waits for it.
    """

    def __init__(self, order: FetchOrder) -> None:
        self.order = order
        self.parts: list[Fetch] = []
        self.reason: str | None = None
        self.cancelled = False

    @property
    def succeeded(self) -> bool:
        """Whether every part has."""
        return self.reason is None and all(part.over for part in self.parts)

    @property
    def writes_ended(self) -> bool:
        """Nothing lands in its blocks any more."""
        return all(part.writes_ended for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""
        return sum(part.nbytes for part in self.parts)

    def fail(self, reason: str) -> None:
        """Ends every part that is not over."""
        for part in self.parts:
            part.fail(reason)

    def cancel(self) -> None:
        """No request waits for it any more."""
        if not self.succeeded and self.reason is None:
            self.cancelled = True
            self.fail("cancelled")
