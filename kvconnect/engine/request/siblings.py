"""The completions of one prompt: the first computes the prompt, the others start afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.errors import EngineClosed


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
