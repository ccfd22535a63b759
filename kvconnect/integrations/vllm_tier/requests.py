"""The part of a request's chunks whose names cover their content."""

from __future__ import annotations

from typing import Any

from kvconnect.digest.doubts import Doubt, note_doubt

__all__ = ["NamedTokens"]

_ALL = 1 << 62


class NamedTokens:
    """The distinction between chunks of tokens only and those with pictures, sounds or videos.

    vLLM names the latter by identifiers, which may be the client's own. So another picture could
    have the same name. Belongs to the scheduler's thread.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._ends: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        """Records a new request of the scheduler."""
        request = self._scheduler.requests.get(request_id)
        if request is None or getattr(request, "resumable", False):
            end = 0  # vLLM adds inputs to a stream that no tier can see
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
        """Returns whether the name of `chunk` covers its content.

        Args:
            chunk: vLLM's key.
            context: vLLM's ``ReqContext``.
        """
        limit = self._ends.get(context.req_id) if self._ends else None
        if limit is None:
            return True
        end = context.get_offload_key_position(chunk)
        return end is not None and end <= limit
