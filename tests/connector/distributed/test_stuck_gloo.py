"""No wait for another rank lasts as long as gloo's, which may have no end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from kvconnect.connector.rank_link import Message, RankLink
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

    def recv(self, *_: object) -> StuckWork:
        return StuckWork(self.over)

    def send(self, *_: object) -> StuckWork:
        return StuckWork(self.over)

    def allreduce(self, *_: object) -> StuckWork:
        return StuckWork(self.over)


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


def test_a_wait_for_a_message_ends_with_its_timeout_and_with_the_link(group: StuckGroup) -> None:
    link = RankLink(group, 0)
    with pytest.raises(TimeoutError):
        link.receive(0.05)
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(link.receive, None)
        link.end()
        with pytest.raises(ConnectionError, match="was ended"):
            answer.result(20)
    with pytest.raises(ConnectionError, match="was ended"):
        link.receive(None)


def test_a_wait_until_messages_are_taken_ends_too(group: StuckGroup) -> None:
    link = RankLink(group, 0)
    link.send(Message(1, 0, 1, bytes(10_000)))
    with pytest.raises(TimeoutError):
        link.wait_until_sent(0.05)
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(link.wait_until_sent, 60.0)
        link.end()
        with pytest.raises(ConnectionError, match="was ended"):
            answer.result(20)
    with pytest.raises(ConnectionError, match="was ended"):
        link.send(Message(1, 0, 2, b""))


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
