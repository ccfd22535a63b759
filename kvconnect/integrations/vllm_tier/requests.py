"""The chunks of live requests: whose names cover their content, and the order they come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.integrations.vllm_tier.transfers import ChunkSave

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


class Parents:
    """The last chunk of each request that is known to be stored or being saved.

    Belongs to the scheduler's thread. An unknown parent only affects the order in which a full
    store drops chunks.

    Args:
        tokens: the tokens of a chunk, by KV cache group.
    """

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self._tokens = dict(tokens)
        self._last: dict[str, dict[int, tuple[int, bytes]]] = {}

    def note(self, chunk: bytes, request: Any) -> None:
        """Records that the store has `chunk` of `request` (vLLM's ``ReqContext``)."""
        end = request.get_offload_key_position(chunk)
        if end is None:
            return
        last = self._last.setdefault(request.req_id, {})
        group = _group(chunk)
        known = last.get(group)
        if known is None or known[0] < end:
            last[group] = (end, chunk)

    def in_order(self, pairs: Sequence[tuple[bytes, int]], request: Any) -> list[ChunkSave]:
        """Returns chunks with their rows, in the order of the prompt of `request`."""
        placed = sorted(
            (_group(chunk), request.get_offload_key_position(chunk) or 0, chunk, row)
            for chunk, row in pairs
        )
        last = self._last.setdefault(request.req_id, {})
        saves = []
        for group, end, chunk, row in placed:
            before = end - (end % self._tokens[group] or self._tokens[group])
            parent: bytes | None = None
            if end and not before:
                parent = b""
            elif (known := last.get(group)) is not None and known[0] == before:
                parent = known[1]
            saves.append(ChunkSave(chunk, row, parent))
            last[group] = (end, chunk)
        return saves

    def forget(self, request: str) -> None:
        """Forgets an ended request; a save that was submitted before continues."""
        self._last.pop(request, None)


def _group(chunk: bytes) -> int:
    return int.from_bytes(chunk[-4:], "big")
