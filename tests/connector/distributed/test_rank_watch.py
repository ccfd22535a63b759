"""How long a rank may be silent, by the clock of a rank that is itself held up."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

import pytest

from kvconnect.connector.ranks import watch as rank_watch
from kvconnect.connector.ranks.watch import RankWatch, VerdictKind

SILENCE_S = 4.0
BEAT_S = 0.25


class Clock:
    """Stands for the module `time`, and for the event that ends the watch.

    Args:
        pauses: seconds that each wait for the next look takes; the watch ends with them.
    """

    def __init__(self, pauses: Iterable[float]) -> None:
        self.now = 0.0
        self._pauses = iter(pauses)

    def monotonic(self) -> float:
        return self.now

    def wait(self, _: float) -> bool:
        pause = next(self._pauses, None)
        self.now += pause or 0.0
        return pause is None


class SilentPeer(RankWatch):
    """The watch of rank 0, which hears nothing of rank 1."""

    def __init__(self, clock: Clock) -> None:
        self._rank, self._peers, self._silence_s = 0, [1], SILENCE_S
        self._awake_s, self._heard, self._left = 0.0, {1: 0.0}, set()
        self._closing, self._over = clock, threading.Event()
        self.judged_at: float | None = None

    def judge(self, kind: VerdictKind, rank: int, text: str) -> None:
        assert (kind, rank) == (VerdictKind.LOST, 1)
        self.judged_at = self._closing.now
        self._over.set()


def judged_at(pauses: Iterable[float], monkeypatch: pytest.MonkeyPatch) -> float | None:
    """Returns when the silent rank was given up; ``None``: never."""
    clock = Clock(pauses)
    monkeypatch.setattr(rank_watch, "time", clock)
    watch = SilentPeer(clock)
    watch._look()
    return watch.judged_at


def test_a_silent_rank_is_given_up_after_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged_at(itertools.repeat(BEAT_S, 100), monkeypatch) == SILENCE_S + BEAT_S


def test_a_silent_rank_is_given_up_though_each_look_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a machine under load, in which a thread is held up for seconds again and again."""
    given_up_at = judged_at(itertools.repeat(2.5, 100), monkeypatch)
    assert given_up_at is not None
    assert given_up_at <= 5 * 2.5


def test_a_rank_that_was_stopped_first_reads_what_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up_at = judged_at([600.0, *itertools.repeat(BEAT_S, 100)], monkeypatch)
    assert given_up_at is not None
    assert given_up_at >= 600.0 + SILENCE_S / 2
