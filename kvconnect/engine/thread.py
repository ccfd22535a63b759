"""Runs the engine's thread, which makes steps while there is work, and accepts messages."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from kvconnect.engine.engine import Engine
from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.engine.request.owner import Owner
from kvconnect.errors import EngineClosed
from kvconnect.trace import metrics

_log = logging.getLogger(__name__)

_Message = TypeVar("_Message")


class Inbox(Generic[_Message]):
    """The messages for one reader, and a bell that wakes it. Only `wait` blocks.

    Attributes:
        owner: the process of its reader.
    """

    def __init__(self) -> None:
        self._messages: deque[_Message] = deque()
        self._changed = threading.Condition()
        self._rung = False
        self._closed = False
        self._cause: BaseException | None = None
        self.owner = Owner()

    def post(self, message: _Message) -> None:
        """Adds `message` and wakes the reader.

        Raises:
            EngineClosed: the reader has stopped (the cause is the error that ended it, if any), or
                is in another process.
        """
        self.owner.check()
        with self._changed:
            self._check_not_closed()
            self._messages.append(message)
            self._rung = True
            self._changed.notify()

    def check_open(self) -> None:
        """Checks that `post` works.

        Raises:
            EngineClosed: as `post` does.
        """
        self.owner.check()
        self._check_not_closed()

    def _check_not_closed(self) -> None:
        if self._closed:
            what = "the engine was closed" if self._cause is None else "the engine has failed"
            raise EngineClosed(f"{what}: it takes no more requests") from self._cause

    def ring(self) -> None:
        """Wakes the reader; if it is awake, its next `wait` returns at once."""
        with self._changed:
            self._rung = True
            self._changed.notify()

    def take(self) -> Iterator[_Message]:
        """Yields the messages so far, oldest first; removes each when it is yielded."""
        for _ in range(len(self._messages)):
            with self._changed:
                if not self._messages:  # closed meanwhile
                    return
                message = self._messages.popleft()
            yield message

    def wait(self, timeout: float | None) -> bool:
        """Sleeps until the bell rings, or rang since the last wait; False if `timeout` s passed."""
        with self._changed:
            rang = self._changed.wait_for(lambda: self._rung, timeout)
            self._rung = False
        return rang

    def close(self, cause: BaseException | None) -> list[_Message]:
        """Closes the inbox; returns the remaining messages. The first cause is kept."""
        with self._changed:
            self._closed, self._cause = True, self._cause or cause
            left, self._messages = list(self._messages), deque()
        return left


@dataclass(frozen=True, slots=True)
class Abort:
    """The message to end a request now."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Close:
    """The message to end all requests and the thread."""


Message: TypeAlias = LiveRequest | Abort | Close | Future[bool]
"""The future is the message to drop all cached blocks; its result says whether they were."""


def post_abort(inbox: weakref.ref[Inbox[Message]], request_id: int) -> None:
    """Makes the engine of `inbox` end a request; does nothing once either has ended."""
    if (engine := inbox()) is not None:
        with contextlib.suppress(EngineClosed):
            engine.post(Abort(request_id))


class EngineThread:
    """The thread that owns an engine, with its interface for other threads.

    Args:
        engine: no other thread may use it from now on.
        inbox: empty; rung when a transfer of the engine's connector ended.
        close_s: the longest wait of `close`; ``None``: until the thread has ended.
        after_step: called by the thread after every step; must not block.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox[Message],
        *,
        close_s: float | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._after_step = after_step or (lambda: None)
        self._inbox = inbox
        self._close_s = close_s
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvconnect-engine", daemon=True)
        self._thread.start()

    def reset_cache(self) -> bool:
        """Makes the engine drop all cached blocks; blocks for a step.

        Returns:
            True if all were dropped. False if some are in use; then none was dropped.

        Raises:
            EngineClosed: as `Inbox.post` does.
        """
        dropped: Future[bool] = Future()
        self._inbox.post(dropped)
        return dropped.result()

    def close(self, *, wait: bool = True) -> None:
        """Makes the engine abort running requests and drain its connector; blocks if `wait`.

        With `wait` every request has ended afterwards, even if the thread is stuck in a connector.
        A stuck thread is abandoned, and cannot keep the process from ending.
        """
        with contextlib.suppress(EngineClosed):
            self._inbox.post(Close())
        if not wait or not self._thread.is_alive():  # the thread does not exist in a forked process
            return
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            _log.error("the connector did not shut down within %g s: left behind", self._close_s)
            self._closing = True  # a thread that resumes later gets no message of it
            self._turn_away(EngineClosed("the engine was closed, and its connector is stuck"))
            self._engine.abandon()
            self._inbox.ring()

    def _run(self) -> None:
        """Steps until a close message, aborts the running requests, drains the connector.

        An error in a step ends the engine: every request in it fails with that error, which is
        also the cause of the `EngineClosed` that later ones get.
        """
        error: BaseException | None = None
        hide = metrics.add_gauges(self._engine.sizes)
        try:
            self._step_until_closed()
        except BaseException as caught:  # noqa: BLE001  handed to all that wait
            error = caught
            _log.error("the engine stopped: %s", _told(caught))
        # Before the connector drains, which may take long.
        self._turn_away(error)
        try:
            self._engine.shutdown(failed=error is not None)
        except BaseException as caught:  # noqa: BLE001  no caller is there to take it
            self._inbox.close(caught)
            _log.error("the connector did not shut down: %s", _told(caught))
        hide()

    def _step_until_closed(self) -> None:
        while True:
            self._receive()
            if self._closing:
                break
            had_effect = self._engine.step()
            self._after_step()
            if not had_effect:
                self._inbox.wait(self._engine.wait_seconds())
        self._engine.abort_all()

    def _receive(self) -> None:
        for message in self._inbox.take():
            match message:
                case LiveRequest():
                    self._engine.admit(message)
                case Abort():
                    self._engine.abort(message.request_id)
                case Future():
                    try:
                        message.set_result(self._engine.reset_cache())
                    except BaseException as error:
                        message.set_exception(error)
                        raise
                case Close():
                    self._closing = True

    def _turn_away(self, error: BaseException | None) -> None:
        """Stops accepting requests, and fails the waiting ones."""
        left = self._inbox.close(error)
        late = error or EngineClosed("the engine was closed before the request was taken in")
        for message in left:
            if isinstance(message, LiveRequest):
                message.fail(late)
            elif isinstance(message, Future):
                message.set_exception(late)
        self._engine.fail_all(late)


def _told(error: BaseException) -> str:
    """Formats `error` with its traceback: a log record that is kept must not keep the engine."""
    return "".join((str(error), "\n", *traceback.format_exception(error))).rstrip()
