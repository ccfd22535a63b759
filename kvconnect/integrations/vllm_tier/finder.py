"""A finder that looks chunks up in the store, on the store's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby

from kvconnect.connector.io.access import Access
from kvconnect.errors import KvConnectError
from kvconnect.integrations.vllm_tier.identity import ChunkNames
from kvconnect.integrations.vllm_tier.lookups import Answers
from kvconnect.trace import warn_once

__all__ = ["Finder"]

Question = tuple[bytes, int]

_AT_ONCE = 256
"""Chunks of one call to the store: their keys are hashed on the loop, which has more to do."""

_GAPS = 8
"""The missing chunks of a prompt after which the rest is not looked up.

A group with full attention cannot use chunks after the first missing one; one with a window may
continue behind it."""

_CALLS = 4


class Finder:
    """Looks chunks up for the scheduler's steps, in order for each prompt and group.

    Args:
        access: the access to the store.
        names: returns the present names of chunks in it.
        answer: called on the loop with each answer as soon as it is known.
        timeout_s: seconds after which questions that were not sent are answered with no.
    """

    def __init__(
        self,
        access: Access,
        names: Callable[[], ChunkNames],
        answer: Callable[[Answers], None],
        *,
        timeout_s: float,
    ) -> None:
        self._access = access
        self._names = names
        self._answer = answer
        self._timeout_s = timeout_s
        self._running: set[asyncio.Task[None]] = set()
        self._calls = asyncio.Semaphore(_CALLS)

    def find(self, questions: Sequence[Sequence[Question]]) -> None:
        """Begins to look up one list of chunks for each request. Any thread; does not wait."""
        self._access.store.io.call_soon(lambda: self._begin(questions))

    def _begin(self, questions: Sequence[Sequence[Question]]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout_s
        for asked in questions:
            for _, of_group in groupby(asked, key=lambda question: question[0][-4:]):
                task = loop.create_task(self._find(list(of_group), until))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _find(self, questions: Sequence[Question], until: float) -> None:
        left = list(questions)
        try:
            async with self._calls:
                for _ in range(_GAPS):
                    found = await self._leading(left, until)
                    self._tell(left[:found], known=True)
                    self._tell(left[found : found + 1], known=False)
                    left = left[found + 1 :]
                    if not left:
                        break
        except KvConnectError as error:
            warn_once("vllm_tier.lookup", f"chunks are not looked up: {error}")
        finally:
            self._tell(left, known=False)

    async def _leading(self, questions: Sequence[Question], until: float) -> int:
        """Returns how many leading `questions` the store has; reports those it has at once."""
        found = 0
        for start in range(0, len(questions), _AT_ONCE):
            part = questions[start : start + _AT_ONCE]
            if asyncio.get_running_loop().time() > until:
                break
            names = self._names()
            keys = [self._access.store_key(names.block_key(chunk), 0) for chunk, _ in part]
            present = await self._access.store.backend.lookup(keys)
            found += present
            if present < len(part):
                break
        return found

    def _tell(self, questions: Sequence[Question], *, known: bool) -> None:
        if questions:
            self._answer([(chunk, number, known) for chunk, number in questions])
