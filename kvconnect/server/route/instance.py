"""A server behind the router, and its state as far as known."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvconnect.server.route.prompt import HeldPrefixes, Prompt

if TYPE_CHECKING:
    from kvconnect.events.held import HeldBlocks

_log = logging.getLogger(__name__)

Role: TypeAlias = Literal["prefill", "decode"]
Outcome: TypeAlias = Literal["busy", "late", "failed"]
Address: TypeAlias = tuple[str, int]
"""The address of a control channel: host and port."""


class InstanceFailed(Exception):
    """The error of a server that did not answer a request; another one may.

    Attributes:
        instance: the server.
        outcome: ``busy`` (the server answered so), ``late``, or ``failed``.
    """

    def __init__(self, instance: Instance, reason: str, outcome: Outcome) -> None:
        super().__init__(f"{instance.name}: {reason}")
        self.instance = instance
        self.outcome = outcome


class Instance:
    """A server, used by the event loop's thread only.

    Args:
        role: the role of the server in this list; a server of role ``both`` may be in both lists.
        number: the server's number in its list, from 0.
        url: the server's URL, without a path.
        max_prefixes: the most prefixes that are recorded.

    Attributes:
        prefixes: the prefixes of requests that this router sent it.
        held: the blocks that it holds, according to its events; ``None``: it publishes none.
        address: the address of its control channel, from its last answer; ``None``: not known.
        load: the pieces of prompts that it still has to compute, plus a constant for each request.
        running: the number of requests that it answers.
        chosen: the number of its last choice; larger numbers are later.
        down: the reason why it gets no requests; ``None``: it is up.
    """

    def __init__(self, role: Role, number: int, url: str, max_prefixes: int) -> None:
        self.role: Role = role
        self.name = f"{role} {number}"
        self.url = url
        self.prefixes = HeldPrefixes(max_prefixes)
        self.held: HeldBlocks | None = None
        self.address: Address | None = None
        self.load = 0
        self.running = 0
        self.chosen = 0
        self.down: str | None = None
        self._engine: str | None = None
        self._coming: Counter[bytes] = Counter()
        self._waits: set[asyncio.Timeout] = set()

    @contextmanager
    def loaded(self, load: int, prefixes: Sequence[bytes] = ()) -> Iterator[None]:
        """Counts a running request with `load`, which computes `prefixes`, during the context."""
        self.load += load
        self.running += 1
        self._coming.update(prefixes)
        try:
            yield
        finally:
            self.load -= load
            self.running -= 1
            self._coming.subtract(prefixes)
            for prefix in prefixes:
                if not self._coming[prefix]:
                    del self._coming[prefix]

    def pieces_of(self, prompt: Prompt) -> int:
        """Returns how many leading pieces of `prompt` the server holds or computes.

        The number is exact if the server publishes events and the token ids are known. Otherwise it
        is estimated from the requests that were sent to the server.
        """
        if self.held is None or prompt.tokens is None:
            return self.prefixes.matched(prompt.prefixes)
        coming = sum(1 for _ in takewhile(self._coming.__contains__, prompt.prefixes))
        return max(coming, self._known(self.held, prompt, prompt.tokens))

    @staticmethod
    def _known(held: HeldBlocks, prompt: Prompt, tokens: Sequence[int]) -> int:
        if held.block_size is None or not tokens:
            return 0
        links = prompt.links(held.block_size)
        blocks = held.matched(links)
        if links and blocks == len(links):
            return len(prompt.prefixes)  # the whole prompt
        return min(
            prompt.num_pieces * blocks * held.block_size // len(tokens), len(prompt.prefixes)
        )

    @asynccontextmanager
    async def answering(self, until: float) -> AsyncIterator[None]:
        """Limits the wait for an answer to a deadline, and to the time that the server is up.

        Args:
            until: the deadline, by the event loop's clock.

        Raises:
            InstanceFailed: the server went down, or the deadline has passed.
        """
        if self.down is not None:
            raise InstanceFailed(self, self.down, "failed")
        try:
            async with asyncio.timeout_at(until) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if self.down is not None:
                raise InstanceFailed(self, self.down, "failed") from error
            raise InstanceFailed(self, "no answer in time", "late") from error

    def went_down(self, reason: str) -> None:
        """Marks the server as down, and fails the requests that wait for it. Idempotent."""
        if self.down is None:
            _log.warning("%s (%s) is down: %s", self.name, self.url, reason)
        self.down = reason
        # A restarted server has an empty cache.
        self._forget()
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)

    def drains(self, reason: str) -> None:
        """Marks the server as draining: it gets no new requests, and answers its running ones.

        Idempotent.
        """
        self.down = reason
        self._forget()

    def came_up(self) -> None:
        """Marks the server as up. Idempotent."""
        if self.down is not None:
            _log.warning("%s (%s) is up", self.name, self.url)
        self.down = None

    def told(self, engine: str | None, address: Address | None) -> None:
        """Records that an answer came from `engine`, whose control channel is at `address`."""
        if self._engine not in {None, engine}:
            self._forget()
        self._engine = engine
        if address is not None:
            self.address = address

    def _forget(self) -> None:
        self.prefixes.clear()
        self.address = None
