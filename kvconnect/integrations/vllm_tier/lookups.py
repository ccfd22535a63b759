"""The lookups of chunks: sent to the store in the background, answered to the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvconnect.connector.io.access import Access
from kvconnect.errors import KvConnectError
from kvconnect.integrations.vllm_tier.identity import ChunkNames
from kvconnect.trace import warn_once

_AT_ONCE = 256
"""Chunks of one call to the store: their keys are hashed on the loop, which has more to do."""
_GAPS = 8
"""The missing chunks of a prompt after which the rest is not looked up.

A group with full attention cannot use chunks after the first missing one; one with a window may
continue behind it."""
_CALLS = 4

Answers = list[tuple[bytes, int, bool]]
"""The chunks with the number of their question, and whether the store has them."""


@dataclass(slots=True, eq=False)
class _Chunk:
    found: bool | None = None
    number: int = -1  # the number of the question whose answer counts
    asked_at: float = 0.0
    num_requests: int = 0


class Lookups:
    """The answers that live requests were given. Belongs to the scheduler's thread.

    The next request asks for a missing chunk again, since it may have been stored meanwhile. The
    same request asks only once, and computes the chunk. So a chunk that is found but cannot be
    loaded is not reported again and again.

    vLLM asks for each chunk of a prompt in each step until all are known. Each call costs it
    several microseconds. A prompt waits if one chunk needs another call, and the scan ends at the
    first chunk that is missing. So the chunk after an awaited one is reported as missing, if its
    request has looked it up already. Layers with a window are left out: vLLM scans their chunks
    from the end, and continues behind a missing one.

    Args:
        timeout_s: what is not answered by then counts as missing.

    Attributes:
        unanswered: a lookup of this step awaits an answer; the caller resets it.
    """

    def __init__(self, timeout_s: float) -> None:
        self.unanswered = False
        self._timeout_s = timeout_s
        self._awaited: tuple[str, bytes, int] | None = None  # the last one of this scan
        self._chunks: dict[bytes, _Chunk] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._new: dict[str, list[bytes]] = {}
        self._next_number = 0
        self._answers: deque[Answers] = deque()

    def __len__(self) -> int:
        return len(self._chunks)

    def lookup(self, chunk: bytes, request: Any) -> bool | None:
        """Returns whether the store has `chunk`; ``None`` before its answer. Asks if needed.

        Args:
            chunk: vLLM's key.
            request: vLLM's ``ReqContext``.
        """
        if self._answers:
            self._take_answers()
        asked = self._of_request.setdefault(request.req_id, set())
        known = self._chunks.get(chunk)
        if known is None:
            known = self._chunks[chunk] = _Chunk()
        is_new = chunk not in asked
        if is_new:
            asked.add(chunk)
            known.num_requests += 1
            if known.found is False or known.number < 0:
                self._question(known, chunk, request.req_id)
        elif known.found is None and time.monotonic() - known.asked_at > self._timeout_s:
            known.found, known.number = False, -1
        if known.found is not None:
            return known.found
        self.unanswered = True
        return False if not is_new and self._is_behind_awaited(chunk, request) else None

    def missing(self, chunks: Sequence[bytes]) -> None:
        """Marks `chunks`, which could not be loaded, as missing for requests that asked."""
        for chunk in chunks:
            if (known := self._chunks.get(chunk)) is not None:
                known.found, known.number = False, -1

    def miss_all(self) -> None:
        """Marks all known chunks as missing and drops open questions."""
        self._new.clear()
        self.missing(list(self._chunks))

    def take_questions(self) -> list[list[tuple[bytes, int]]]:
        """Ends the step's scan; returns the new questions: chunks with numbers for `answer`.

        There is one list for each request, in the order of its questions.
        """
        self._awaited = None
        questions = [
            [(chunk, self._chunks[chunk].number) for chunk in chunks if chunk in self._chunks]
            for chunks in self._new.values()
        ]
        self._new = {}
        return questions

    def answer(self, answers: Answers) -> None:
        """Stores `answers`. Any thread may call this."""
        self._answers.append(answers)

    def forget(self, request: str) -> None:
        """Forgets an ended request. Its new questions are still asked, for other requests."""
        for chunk in self._of_request.pop(request, ()):
            known = self._chunks[chunk]
            known.num_requests -= 1
            if not known.num_requests:
                del self._chunks[chunk]

    def _is_behind_awaited(self, chunk: bytes, request: Any) -> bool:
        """Returns whether `chunk`, which `request` awaits, follows another such in this scan."""
        last, self._awaited = self._awaited, None
        end = request.get_offload_key_position(chunk)
        if end is None:
            return False
        if last is not None and last[:2] == (request.req_id, chunk[-4:]) and last[2] < end:
            return True
        self._awaited = request.req_id, chunk[-4:], end
        return False

    def _question(self, known: _Chunk, chunk: bytes, request: str) -> None:
        known.found = None
        known.number = self._next_number
        known.asked_at = time.monotonic()
        self._next_number += 1
        self._new.setdefault(request, []).append(chunk)

    def _take_answers(self) -> None:
        while self._answers:
            for chunk, number, found in self._answers.popleft():
                known = self._chunks.get(chunk)
                if known is not None and known.number == number:
                    known.found = found


Question = tuple[bytes, int]


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
