"""The kit with engines of two ranks: on a disk, and on a real Redis server whose network fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from redis_server import RedisServer

from kvconnect.backend import Backend
from kvconnect.backends import open_backend
from kvconnect.testing import Address, Subject, Violation, check_backend
from kvconnect.testing.subjects import DiskSubject, MemorySubject
from kvconnect_bench.soaks import rank_soak
from kvconnect_bench.soaks.rank_soak import soak_ranks


class RedisSubject(Subject):
    def __init__(self, server: RedisServer) -> None:
        self.address = Address("127.0.0.1", server.port)

    def store_url(self) -> str:
        return self.store_url_via(self.address)

    def store_url_via(self, address: Address) -> str:
        return f"redis://{address.host}:{address.port}"

    def make_backend(self) -> Backend:
        return open_backend(self.store_url()).inner


@pytest.fixture(params=["disk", "redis"])
def subject(request, tmp_path: Path):
    """A store that other processes can open, for engines of two ranks."""
    server = None
    if request.param == "disk":
        made: Subject = DiskSubject(tmp_path / "store")
    else:
        server = RedisServer(tmp_path / "redis", "--save", "").start()
        made = RedisSubject(server)
    made.ranks = 2
    yield made
    if server is not None:
        server.stop()
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_engines_of_one_rank_are_what_is_checked_by_default():
    (outcome,) = check_backend(
        MemorySubject(), only=["end to end.same_tokens_on_several_ranks"]
    ).outcomes
    assert (outcome.result, outcome.reason[:23]) == ("skipped", "the engine has one rank")


@pytest.mark.slow
def test_end_to_end_on_two_ranks(subject):
    report = check_backend(subject, only=["end to end"])
    report.raise_on_failure()
    assert len(report.of("passed")) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_soak_on_two_ranks(subject):
    report = soak_ranks(subject, seconds=60, seed=1)
    print(report)
    assert report.counts["engines"] >= 2
    assert report.counts["tokens from the store"] > 0


@pytest.mark.slow
def test_a_soak_finds_other_tokens(tmp_path, monkeypatch):
    right = rank_soak._RankSoak._answers_of_one_rank
    monkeypatch.setattr(
        rank_soak._RankSoak, "_answers_of_one_rank", lambda self: [[1], *right(self)[1:]] * 24
    )
    subject = DiskSubject(tmp_path / "store")
    subject.ranks = 2
    with pytest.raises(Violation, match=r"seed 3, .*other tokens than without a store"):
        soak_ranks(subject, seconds=60, seed=3)
