"""A request as its submitter sees it, while the engine's thread works on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from kvconnect.engine.request.output import RequestOutput, StreamChunk
from kvconnect.engine.request.stops import FinishReason

__all__ = ["RequestHandle", "RequestProgress"]


class RequestProgress:
    """What has come out of a request so far: written by the engine's thread, read by any other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = threading.Event()  # apart: who waits for the end is not woken by each token
        self._streams = 0
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    def add(self, token: int, text: str) -> None:
        """One more token, and the text that it made certain."""
        with self._changed:
            self._tokens.append(token)
            self._texts.append(text)
            if self._streams:
                self._changed.notify_all()

    def finish(self, output: RequestOutput, rest: str = "") -> None:
        """The end; `rest` is text that came with no token of its own."""
        with self._changed:
            self._texts.append(rest)
            self._output = output
            self._end()

    def fail(self, error: BaseException) -> None:
        """The end, by an error; later ones are ignored."""
        with self._changed:
            if not self.done:
                self._error = error
            self._end()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._output is not None or self._error is not None

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end; see `RequestHandle.result`."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request has not finished within {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._output is not None  # noqa: S101  done without an error
        return self._output

    def wait_beyond(self, seen: int) -> tuple[tuple[int, ...], str, FinishReason | None]:
        """Wait for more than `seen` tokens, or the end: new tokens, new text, why it ended."""
        with self._changed:
            self._streams += 1
            try:
                self._changed.wait_for(lambda: len(self._tokens) > seen or self.done)
            finally:
                self._streams -= 1
            # All of it under the lock: an end that comes after these tokens may bring others.
            tokens, texts = tuple(self._tokens[seen:]), self._texts[seen:]
            output, error = self._output, self._error
        if error is not None:
            raise error
        return tokens, "".join(texts), None if output is None else output.finish_reason

    def _end(self) -> None:
        self._changed.notify_all()
        self._ended.set()


class RequestHandle:
    """A submitted request. Every method may be called from any thread."""

    def __init__(
        self, request_id: int, progress: RequestProgress, abort: Callable[[int], None]
    ) -> None:
        self.request_id = request_id
        self._progress = progress
        self._abort = abort

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._progress.done

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the output.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds; it goes on.
            KvConnectError: or whatever else ended the engine while the request was in it.
        """
        return self._progress.result(timeout)

    def stream(self) -> Iterator[StreamChunk]:
        """What comes out, from the start, as it comes; the last chunk has a finish reason.

        Raises:
            KvConnectError: as in `result`, in place of the chunk that never came.
        """
        seen = 0
        reason: FinishReason | None = None
        while reason is None:
            tokens, text, reason = self._progress.wait_beyond(seen)
            seen += len(tokens)
            yield StreamChunk(self.request_id, tokens, text, reason)

    def abort(self) -> None:
        """End it now; its result has what came so far. Does nothing once it has ended."""
        self._abort(self.request_id)
