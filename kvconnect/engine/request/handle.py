"""The handle of a submitted request, and the completions of its prompt."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence

from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.engine.request.logprobs import PromptLogprobs
from kvconnect.engine.request.output import RequestOutput, StreamChunk, as_one
from kvconnect.engine.request.owner import Owner
from kvconnect.errors import EngineClosed


class RequestHandle:
    """A submitted request. Every method may be called from any thread.

    In a coroutine, ``await handle`` returns the output, and ``async for chunk in handle`` yields it
    piece by piece; neither needs a thread. Cancelling the ``await``, or leaving the ``async for``
    early, aborts the request.

    Args:
        lives: the live request of each completion.
        abort: aborts them.
        in_use: keeps the engine open as long as the handle exists. So the engine itself holds
            `lives` and not the handle.
    """

    def __init__(
        self, lives: Sequence[LiveRequest], abort: Callable[[], None], in_use: object = None
    ) -> None:
        self.request_id = lives[0].request.request_id
        self._lives = lives
        self._abort = abort
        self._in_use = in_use

    @property
    def done(self) -> bool:
        """Returns whether the request has ended."""
        return all(live.done for live in self._lives)

    @property
    def submitted_at(self) -> float:
        """Returns the time of submission, in seconds of `time.perf_counter`."""
        return self._lives[0].request.arrived_at

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The tokens of the prompt."""
        request = self._lives[0].request
        tokens: list[int] = request.tokens.view[: request.prompt_len].tolist()
        return tokens

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The log probabilities of the prompt's tokens; ``None`` if not requested.

        They are complete once the first chunk of the output has arrived. Before that the last ones
        are missing.
        """
        return self._lives[0].prompt_logprobs

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Waits for the output.

        Raises:
            TimeoutError: the request has not ended within `timeout` seconds; it continues.
            EngineClosed: the request has not ended, and this process was forked from the engine's.
            KvConnectError: the request or the engine ended by this error, which may also have
                another class.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        outputs = []
        for live in self._lives:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                outputs.append(live.result(left))
            except TimeoutError:
                if live.done:
                    raise  # the error that ended it
                raise TimeoutError(f"the request has not finished within {timeout} s") from None
        return as_one(outputs)

    def stream(self) -> Iterator[StreamChunk]:
        """Yields the output, from the start, as it arrives; the last chunk has a finish reason.

        With several completions, chunks of all of them come in the order of their arrival.

        Raises:
            KvConnectError: raised as by `result`, after the chunks that arrived.
        """
        changed, owner = threading.Event(), Owner()
        reader = _Reader(self._lives, changed.set)
        try:
            while not reader.ended:
                owner.check()  # a fork may come between two chunks
                changed.wait()
                changed.clear()
                yield from reader.take()
        finally:
            reader.close()

    def abort(self) -> None:
        """Aborts the request; its result has the output so far. Does nothing after its end."""
        self._abort()

    def __await__(self) -> Generator[object, None, RequestOutput]:
        return self._wait().__await__()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        wakeup = _Wakeup(asyncio.get_running_loop())
        reader = _Reader(self._lives, wakeup.ring)
        try:
            while not reader.ended:
                await wakeup.wait()
                for chunk in reader.take():
                    yield chunk
        finally:
            reader.close()
            self._abort_if_left()

    async def _wait(self) -> RequestOutput:
        wakeup = _Wakeup(asyncio.get_running_loop())
        reader = _Reader(self._lives, wakeup.ring)
        try:
            while not self.done:
                await wakeup.wait()
        finally:
            reader.close()
            self._abort_if_left()
        return self.result()

    def _abort_if_left(self) -> None:
        if not self.done:
            self.abort()


class _Reader:
    """A reader of the output of several requests; new output calls `ring`."""

    def __init__(self, lives: Sequence[LiveRequest], ring: Callable[[], None]) -> None:
        self._lives = lives
        self._ring = ring
        self._seen = [0] * len(lives)
        self._open = set(range(len(lives)))
        for live in lives:
            live.add_listener(ring)
        ring()  # listeners do not get earlier output

    @property
    def ended(self) -> bool:
        """Returns whether the last chunk of every request was taken."""
        return not self._open

    def take(self) -> Iterator[StreamChunk]:
        """Yields the output since the last call, at most one chunk of each request."""
        for number in sorted(self._open):
            chunk = self._lives[number].chunk_beyond(self._seen[number])
            if chunk is None:
                continue
            self._seen[number] += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                self._open.discard(number)
            yield chunk

    def close(self) -> None:
        """Stops listening."""
        for live in self._lives:
            live.remove_listener(self._ring)


class _Wakeup:
    """A bell that any thread rings, and that one coroutine of `loop` waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wakes the coroutine, or makes its next `wait` return at once. Never blocks or raises."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: no coroutine waits
            self._loop.call_soon_threadsafe(self._rung.set)

    async def wait(self) -> None:
        """Waits for a ring since the last wait."""
        await self._rung.wait()
        self._rung.clear()


class Siblings:
    """The requests of equal prompts, started so that they share the KV blocks of the prompt.

    Every method may be called from any thread, and none waits for the engine.

    Args:
        lives: at least one; none has been posted to the engine.
        post: posts a request to the engine; raises `EngineClosed`.
        abort: ends the request with an id, if the engine has it.
    """

    def __init__(
        self,
        lives: Sequence[LiveRequest],
        post: Callable[[LiveRequest], None],
        abort: Callable[[int], None],
    ) -> None:
        self._lives = lives
        self._post = post
        self._abort = abort
        self._lock = threading.Lock()
        self._waiting = lives[1:]  # not posted yet

    def start(self) -> None:
        """Posts the first one.

        Raises:
            EngineClosed: the engine accepts no more requests.
        """
        first = self._lives[0]
        if self._waiting:
            first.add_listener(self._go_on)
        self._post(first)

    def abort(self) -> None:
        """Ends all that have not ended."""
        with self._lock:
            waiting, self._waiting = self._waiting, ()
        for live in waiting:
            live.finish("abort")
        for live in self._lives:
            self._abort(live.request.request_id)

    def _go_on(self) -> None:
        # The first request has a token, so that the prompt's blocks are published; or it ended.
        first = self._lives[0]
        first.remove_listener(self._go_on)
        if first.aborted:
            self.abort()
            return
        with self._lock:  # a later abort finds the requests in the engine
            waiting, self._waiting = self._waiting, ()
            for live in waiting:
                try:
                    self._post(live)
                except EngineClosed as error:
                    live.fail(error)
