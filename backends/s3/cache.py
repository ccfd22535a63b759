"""Answers of the store that are remembered: a bounded number, for a bounded time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["AnswerCache"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class AnswerCache(Generic[K, V]):
    """The `capacity` answers used last. Belongs to one thread.

    Args:
        capacity: entries.
        clock: monotonic seconds.
    """

    def __init__(self, capacity: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._answers: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: K) -> V | None:
        """The answer for `key`, unless it is too old."""
        entry = self._answers.get(key)
        if entry is None:
            return None
        if self._clock() >= entry[0]:
            del self._answers[key]
            return None
        self._answers.move_to_end(key)
        return entry[1]

    def put(self, key: K, answer: V, seconds: float) -> None:
        """Remember `answer` for so many seconds; 0: not at all."""
        if seconds <= 0:
            self._answers.pop(key, None)
            return
        self._answers[key] = (self._clock() + seconds, answer)
        self._answers.move_to_end(key)
        if len(self._answers) > self._capacity:
            self._answers.popitem(last=False)

    def drop(self, key: K) -> None:
        """Forget `key`, at once."""
        self._answers.pop(key, None)
