"""Which chunks the store has: asked in the background, answered to the scheduler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

__all__ = ["Answers", "Lookups"]

Answers = list[tuple[bytes, int, bool]]
"""Chunks with the number of the question, and whether the store has them."""


class _Chunk:
    __slots__ = ("asked_at", "found", "num_requests", "number")

    def __init__(self) -> None:
        self.found: bool | None = None
        self.number = -1  # of the question that the next answer is taken from
        self.asked_at = 0.0
        self.num_requests = 0


class Lookups:
    """What requests that have not ended were told. Belongs to the scheduler's thread.

    A chunk that was missing is asked for again by the next request, for it may have been stored
    meanwhile; by the same request only once: it computes it. So a chunk that is found but cannot be
    loaded does not come up for ever.

    Args:
        timeout_s: what is not answered by then counts as missing.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._chunks: dict[bytes, _Chunk] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._new: dict[str, list[bytes]] = {}
        self._next_number = 0
        self._answers: deque[Answers] = deque()

    def __len__(self) -> int:
        return len(self._chunks)

    def lookup(self, chunk: bytes, request: str) -> bool | None:
        """Whether the store has `chunk`; ``None``: not known yet, ask again in the next step."""
        if self._answers:
            self._take_answers()
        asked = self._of_request.get(request)
        if asked is None:
            asked = self._of_request[request] = set()
        known = self._chunks.get(chunk)
        if known is None:
            known = self._chunks[chunk] = _Chunk()
        if chunk not in asked:
            asked.add(chunk)
            known.num_requests += 1
            if known.found is False or known.number < 0:
                self._question(known, chunk, request)
        elif known.found is None and time.monotonic() - known.asked_at > self._timeout_s:
            known.found, known.number = False, -1
        return known.found

    def missing(self, chunks: Sequence[bytes]) -> None:
        """`chunks` could not be loaded: no request that was told of them is told so again."""
        for chunk in chunks:
            if (known := self._chunks.get(chunk)) is not None:
                known.found, known.number = False, -1

    def take_questions(self) -> list[list[tuple[bytes, int]]]:
        """What came up since the last call: chunks with the numbers that `answer` repeats.

        One list for each request, in the order of its questions.
        """
        if not self._new:
            return []
        questions = [
            [(chunk, self._chunks[chunk].number) for chunk in chunks if chunk in self._chunks]
            for chunks in self._new.values()
        ]
        self._new = {}
        return questions

    def answer(self, answers: Answers) -> None:
        """Take `answers`; from any thread."""
        self._answers.append(answers)

    def forget(self, request: str) -> None:
        """The request ended. What it asked in this step is asked all the same: for others."""
        for chunk in self._of_request.pop(request, ()):
            known = self._chunks[chunk]
            known.num_requests -= 1
            if not known.num_requests:
                del self._chunks[chunk]

    def _question(self, known: _Chunk, chunk: bytes, request: str) -> None:
        known.found = None
        known.number = self._next_number
        known.asked_at = time.monotonic()
        self._next_number += 1
        if (new := self._new.get(request)) is None:
            new = self._new[request] = []
        new.append(chunk)

    def _take_answers(self) -> None:
        while self._answers:
            for chunk, number, found in self._answers.popleft():
                known = self._chunks.get(chunk)
                if known is not None and known.number == number:
                    known.found = found
