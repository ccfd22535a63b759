"""The lookups of chunks: sent to the store in the background, answered to the scheduler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Answers", "Known", "Lookups", "ScanEnd"]

Answers = list[tuple[bytes, int, bool]]
"""The chunks with the number of their question, and whether the store has them."""


class Known(Enum):
    """The answer of a lookup for a request and a chunk."""

    PRESENT = "the store has it"
    MISSING = "the store does not have it, or has not said so in time"
    ASKED = "the store is being asked, since just now"
    AWAITED = "the store has been asked for this request, and has not answered"


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

    def lookup(self, chunk: bytes, request: str) -> Known:
        """Returns whether the store has `chunk`, as far as known; asks the store if needed."""
        if self._answers:
            self._take_answers()
        asked = self._of_request.setdefault(request, set())
        known = self._chunks.get(chunk)
        if known is None:
            known = self._chunks[chunk] = _Chunk()
        waiting = Known.AWAITED
        if chunk not in asked:
            waiting = Known.ASKED
            asked.add(chunk)
            known.num_requests += 1
            if known.found is False or known.number < 0:
                self._question(known, chunk, request)
        elif known.found is None and time.monotonic() - known.asked_at > self._timeout_s:
            known.found, known.number = False, -1
        if known.found is None:
            return waiting
        return Known.PRESENT if known.found else Known.MISSING

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
        """Returns the new questions: chunks with the numbers that `answer` repeats.

        There is one list for each request, in the order of its questions.
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
        """Stores `answers`. Any thread may call this."""
        self._answers.append(answers)

    def forget(self, request: str) -> None:
        """Forgets an ended request. Its new questions are still asked, for other requests."""
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
        self._new.setdefault(request, []).append(chunk)

    def _take_answers(self) -> None:
        while self._answers:
            for chunk, number, found in self._answers.popleft():
                known = self._chunks.get(chunk)
                if known is not None and known.number == number:
                    known.found = found


class ScanEnd:
    """The position at which vLLM's scan of a prompt's chunks can end, while the store is asked.

    vLLM asks for each chunk of a prompt in each step until all are known. Each call costs it
    several microseconds. A prompt waits if one chunk needs another call, and the scan ends at the
    first chunk that is missing. So the chunk after an awaited one is reported as missing, if its
    request has looked it up already. Layers with a window are left out: vLLM scans their chunks
    from the end, and continues behind a missing one.
    """

    def __init__(self) -> None:
        self._last: tuple[str, bytes, int] | None = None

    def is_behind_awaited(self, chunk: bytes, request: Any) -> bool:
        """Returns whether `chunk`, which `request` awaits, follows another such in this scan.

        Args:
            chunk: vLLM's key.
            request: vLLM's ``ReqContext``.
        """
        last, self._last = self._last, None
        end = request.get_offload_key_position(chunk)
        if end is None:
            return False
        if last is not None and last[:2] == (request.req_id, chunk[-4:]) and last[2] < end:
            return True
        self._last = request.req_id, chunk[-4:], end
        return False

    def end_step(self) -> None:
        """Ends the scan; the next step begins another."""
        self._last = None
