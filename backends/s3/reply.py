"""A good answer of the service, whichever way it was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvconnect.backends.s3.body import PlainBody

__all__ = ["Body", "Reply"]


class Body(Protocol):
    """What is read of a reply."""

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes, or all that are left."""

    def readinto(self, view: memoryview, /) -> int:
        """Fill the beginning of `view`; 0 at the end."""

    def close(self) -> None:
        """Let go of the connection."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A good answer.

    Attributes:
        status: of HTTP.
        headers: their names in lower case.
        body: not read yet.
    """

    status: int
    headers: Mapping[str, str]
    body: Body

    def fill(self, views: Sequence[memoryview]) -> int:
        """Fill `views` with the body, one after the other; fewer bytes only where it ends."""
        if isinstance(self.body, PlainBody):
            return self.body.fill(views)
        received = 0
        for view in views:
            filled = 0
            while filled < view.nbytes:
                size = self.body.readinto(view[filled:])
                if not size:
                    return received + filled
                filled += size
            received += filled
        return received
