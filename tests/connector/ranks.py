"""Ranks of one engine in threads of one process; what they exchange is pickled, as on the wire."""

from __future__ import annotations

import pickle
import threading
from typing import Any


class Meeting:
    """Where the ranks of one process exchange values, in turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.exchanges = 0
        self._barrier = threading.Barrier(size, action=self._count, timeout=10)

    def _count(self) -> None:
        self.exchanges += 1

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = pickle.dumps(value)
        self._barrier.wait()
        values = [pickle.loads(one) for one in self.values]
        self._barrier.wait()
        return values


class Rank:
    """One rank's end of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def broadcast(self, value: Any) -> Any:
        return self._meeting.exchange(self.rank, value)[0]

    def allgather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)
