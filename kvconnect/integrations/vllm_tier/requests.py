"""How far the names of a request's chunks tell its content."""

from __future__ import annotations

from typing import Any

from kvconnect.digest.doubts import Doubt, note_doubt

__all__ = ["NamedTokens"]

_ALL = 1 << 62


class NamedTokens:
    """Tells chunks of tokens alone from those with pictures, sounds or videos.

    vLLM's names of the latter hold identifiers, which may be the client's own, so another picture
    could have them. Belongs to the scheduler's thread.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._ends: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        """Notes a new request of the scheduler's."""
        request = self._scheduler.requests.get(request_id)
        if request is None or getattr(request, "resumable", False):
            end = 0  # vLLM adds to streaming input what no tier is told of
        else:
            features = getattr(request, "mm_features", None) or ()
            end = min((one.mm_position.offset for one in features), default=_ALL)
        if end < _ALL:
            self._ends[request_id] = end
            note_doubt(Doubt.USER_IDENTIFIER if request is not None else Doubt.UNKNOWN_INPUT)

    def end(self, request_id: str) -> None:
        """Forgets a request."""
        self._ends.pop(request_id, None)

    def has(self, chunk: bytes, context: Any) -> bool:
        """Returns whether the name of `chunk` tells its content.

        Args:
            chunk: vLLM's key.
            context: vLLM's ``ReqContext``.
        """
        limit = self._ends.get(context.req_id) if self._ends else None
        if limit is None:
            return True
        end = context.get_offload_key_position(chunk)
        return end is not None and end <= limit
