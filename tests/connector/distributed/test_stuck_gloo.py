"""No rank waits as long as gloo does, which may be for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from kvconnect.connector.ranks import watch as rank_watch
from kvconnect.connector.ranks.watch import RankWatch, end_group
from kvconnect.engine.ranks.sums import ModelSums
from kvconnect.errors import RankLost


class StuckWork:
    """An operation of gloo that never ends by itself."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = None if timeout is None else min(60.0, timeout.total_seconds())
        if not self._over.wait(limit):
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()


class StuckGroup:
    """A group of gloo none of whose operations ends, whatever is done with it."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, *_: object) -> StuckWork:
        return StuckWork(self.over)

    def recv(self, *_: object) -> StuckWork:
        return StuckWork(self.over)

    def send(self, *_: object) -> StuckWork:
        self.over.wait(60)
        return StuckWork(self.over)


class LateWork(StuckWork):
    """An operation that ends just after a wait for it gave up."""

    error: str | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._over.is_set():
            self._over.set()
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


class LostRank:
    """A communicator that learns of a lost rank while a sum waits."""

    rank = 1

    def __init__(self) -> None:
        self.asked = 0

    def end_with_ranks(self, group: StuckGroup) -> None:
        """Gloo ends nothing here."""

    def check(self, timeout_s: float = 0.0) -> None:
        self.asked += 1
        if self.asked > 1:
            raise RankLost(0, "rank 0 is lost: planted")


@pytest.fixture
def group():
    made = StuckGroup()
    yield made
    made.over.set()


def test_a_sum_ends_when_a_rank_is_lost_and_its_group_is_kept_from_destruction(
    group: StuckGroup,
) -> None:
    ranks = LostRank()
    sums = ModelSums(group, ranks, 120.0)
    with pytest.raises(RankLost, match="rank 0 is lost: planted"):
        sums.all_reduce(torch.ones(1))
    assert ranks.asked == 2
    assert sums.close() is None
    assert "kvconnect-rank-sum" in {thread.name for thread in threading.enumerate()}


def test_a_sum_that_ends_just_after_a_slice_of_the_wait_has_succeeded(group: StuckGroup) -> None:
    ranks, work = LostRank(), LateWork(group.over)
    group.allreduce = lambda *_: work
    ModelSums(group, ranks, 120.0).all_reduce(torch.ones(1))
    assert ranks.asked == 0


def test_a_sum_that_fails_just_after_a_slice_of_the_wait_has_failed(group: StuckGroup) -> None:
    ranks, work = LostRank(), LateWork(group.over)
    work.error = "Connection closed by peer"
    group.allreduce = lambda *_: work
    with pytest.raises(RankLost, match="rank 1: Connection closed by peer"):
        ModelSums(group, ranks, 120.0).all_reduce(torch.ones(1))


def test_a_silent_rank_is_noticed_though_no_heartbeat_can_be_sent(
    group: StuckGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "END_S", 0.05)
    monkeypatch.setattr(rank_watch.dist, "get_backend", lambda _: "gloo")
    watch = RankWatch(group, silence_s=1.1)
    try:
        verdict = watch.wait(20)
        assert verdict is not None
        assert verdict.text == "rank 1 is lost: no sign of life for 1.1 s"
    finally:
        group.over.set()
        watch.close()


def test_the_end_of_a_group_in_which_no_call_returns_is_not_waited_for(
    group: StuckGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "END_S", 0.05)
    monkeypatch.setattr(rank_watch.dist, "get_backend", lambda _: "gloo")
    asked = threading.Event()

    def size() -> int:
        asked.set()
        group.over.wait()
        return 0

    group.size = size
    with ThreadPoolExecutor(1) as ending:
        ended = ending.submit(end_group, group)
        try:
            ended.result(60)
        finally:
            group.over.set()
    assert asked.is_set()
