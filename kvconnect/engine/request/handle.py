"""A request as its submitter holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.engine.request.output import RequestOutput, StreamChunk

__all__ = ["RequestHandle"]


class RequestHandle:
    """A submitted request. Every method may be called from any thread.

    Args:
        live: the request.
        abort: ends the request with this id. It also keeps the engine open as long as the handle is
            held, which is why the engine itself holds `live` and not the handle.
    """

    def __init__(self, live: LiveRequest, abort: Callable[[int], None]) -> None:
        self.request_id = live.request.request_id
        self._live = live
        self._abort = abort

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._live.done

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the output.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds; it goes on.
            KvConnectError: or whatever else ended the engine while the request was in it.
        """
        return self._live.result(timeout)

    def stream(self) -> Iterator[StreamChunk]:
        """What comes out, from the start, as it comes; the last chunk has a finish reason.

        Raises:
            KvConnectError: as in `result`, in place of the chunk that never came.
        """
        seen = 0
        while True:
            chunk = self._live.wait_beyond(seen)
            seen += len(chunk.token_ids)
            yield chunk
            if chunk.finish_reason is not None:
                return

    def abort(self) -> None:
        """End it now; its result has what came so far. Does nothing once it has ended."""
        self._abort(self.request_id)
