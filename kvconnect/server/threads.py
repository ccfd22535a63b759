"""The threads of a server, separated so that no kind of work waits for another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

_TOKENIZING = 4
_TELLING = 2
_SENDING = 4


class ServerThreads(ExitStack):
    """The threads for blocking or long work beside the event loop.

    Leaving the context calls what was added by `callback`, then ends the threads.

    Attributes:
        parsing: the thread that parses long bodies. One thread, because Python runs only one at a
            time.
        tokenizing: the threads that tokenize text and start requests.
        verbs: the thread that performs the verbs on stored prompts, one after the other.
        sending: the threads that make exports, each as fast as its client reads.
        telling: the thread that collects metrics; each slow store may take half a second to report.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parsing = self._pool("parsing", 1)
        self.tokenizing = self._pool("tokenizing", _TOKENIZING)
        self.telling = self._pool("telling", _TELLING)
        self.sending = self._pool("sending", _SENDING)
        self.verbs = self._pool("verbs", 1)

    def _pool(self, what: str, threads: int) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvconnect-server-{what}")
        return self.enter_context(pool)
