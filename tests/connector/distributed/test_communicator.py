"""Ranks of a job exchange values, and none of them outwaits another that is lost."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import exchanges
import pytest
import torch.distributed as dist
from job import Job, Raised

from kvconnect.connector.ranks.distributed import DistributedCommunicator
from kvconnect.errors import ConfigurationError

SILENCE_S = 1.2  # of what tests stop; the default is 4 s


def raised(answers: list[object], name: str) -> list[Raised]:
    """`answers`, all of which are errors of this class."""
    found = [one for one in answers if isinstance(one, Raised)]
    assert [one.name for one in found] == [name] * len(answers), answers
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_values_of_any_size_arrive_whole_and_in_order(tmp_path: Path, size: int) -> None:
    sizes = [0, 1, 4000, 4040, 4050, 4096, 5000, 1 << 20, 3, 70_000]
    with Job(size, tmp_path) as job:
        expected = [(nbytes, [nbytes + rank for rank in range(size)]) for nbytes in sizes]
        assert job(exchanges.exchange, sizes) == [expected] * size


def test_a_killed_rank_is_named_at_once_by_all_others(tmp_path: Path) -> None:
    with Job(4, tmp_path) as job:
        job.begin(exchanges.step_for_ever, ranks=range(4))
        job.signal(2, signal.SIGKILL)
        for one in raised(job.answers([0, 1, 3]), "RankLost"):
            assert (one.rank, one.text) == (2, "rank 2 is lost: its process ended")
        again = raised(job(exchanges.gather_own, ranks=[0, 1, 3]), "RankLost")
        assert [one.rank for one in again] == [2, 2, 2]
        assert max(one.seconds for one in again) < 30


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_after_its_silence(tmp_path: Path, stopped: int) -> None:
    others = [rank for rank in range(3) if rank != stopped]
    with Job(3, tmp_path, silence_s=SILENCE_S) as job:
        job.signal(stopped, signal.SIGSTOP)
        try:
            for one in raised(job(exchanges.step_for_ever, ranks=others), "RankLost"):
                assert one.rank == stopped
                assert "no sign of life for 1.2 s" in one.text
                assert one.seconds < 30
        finally:
            job.signal(stopped, signal.SIGCONT)
        # It hears what the others think of it.
        [own] = raised(job(exchanges.step_for_ever, ranks=[stopped]), "RankLost")
        assert own.rank is not None


@pytest.mark.parametrize("tries", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_rank_that_was_stopped_and_goes_on_hears_that_it_was_given_up(
    tmp_path: Path, tries: int
) -> None:
    """Its connections broke meanwhile, wherever it was in an exchange or a sum of the model's."""
    for number in range(tries):
        stopped = number % 2
        with Job(2, tmp_path, silence_s=SILENCE_S) as job:
            job.begin(exchanges.step_and_sum_for_ever, ranks=range(2))
            job.signal(stopped, signal.SIGSTOP)
            try:
                [other] = raised(job.answers([1 - stopped]), "RankLost")
                assert other.rank == stopped
                job.signal(1 - stopped, signal.SIGKILL)
            finally:
                job.signal(stopped, signal.SIGCONT)
            raised(job.answers([stopped]), "RankLost")


@pytest.mark.parametrize("tries", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_rank_lost_while_much_is_on_its_way_is_named(tmp_path: Path, tries: int) -> None:
    draw = random.Random(7)
    for number in range(tries):
        lost, how = number % 2, (signal.SIGKILL, signal.SIGSTOP)[number // 2 % 2]
        nbytes = draw.randrange(40_000_000, 120_000_000)
        with Job(2, tmp_path, silence_s=SILENCE_S) as job:
            job.begin(exchanges.exchange_for_ever, nbytes, ranks=range(2))
            time.sleep(draw.uniform(0.0, 0.3))  # wherever the bytes are then
            job.signal(lost, how)
            [other] = raised(job.answers([1 - lost]), "RankLost")
            assert other.rank == lost
            if how is signal.SIGSTOP:
                job.signal(lost, signal.SIGKILL)


def test_a_rank_that_lives_but_does_not_come_is_named_after_the_deadline(tmp_path: Path) -> None:
    with Job(3, tmp_path, timeout_s=0.7) as job:
        errors = raised(job(exchanges.gather_own, ranks=[0, 1]), "RankLost")
        for one in errors:
            assert one.rank == 2
            assert re.search(r"did not come to exchange 1 within 0.7 s \(it made 0\)", one.text)
            assert one.seconds < 30
        [own] = raised(job(exchanges.gather_own, ranks=[2]), "RankLost")
        assert own.rank == 2


def test_an_idle_leader_may_take_longer_than_the_deadline(tmp_path: Path) -> None:
    with Job(2, tmp_path, timeout_s=1.0) as job:
        assert job(exchanges.await_orders, 2.0) == ["work", "work"]
        assert job(exchanges.gather_own) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_ranks_in_different_exchanges_all_raise_at_once(tmp_path: Path, ahead: int) -> None:
    others = [rank for rank in range(3) if rank != ahead]
    with Job(3, tmp_path) as job:
        job.begin(exchanges.gather_own, ranks=[ahead])
        job.begin(exchanges.step_for_ever, ranks=others)
        errors = raised(job.answers(range(3)), "RankDivergence")
        pattern = r"rank \d is in exchange \d, \w+; rank \d in exchange \d, \w+"
        assert all(re.fullmatch(pattern, one.text) for one in errors)
        assert all(f"rank {ahead} " in one.text for one in errors)
        assert max(one.seconds for one in errors) < 30  # not as long as a rank may let others wait


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_pickled_is_raised_on_all_and_they_stay_in_step(
    tmp_path: Path, rank: int
) -> None:
    with Job(2, tmp_path) as job:
        errors = raised(job(exchanges.gather_unpicklable, rank), "ConnectorContractError")
        assert all(one.text.startswith(f"rank {rank}: ") and "pickle" in one.text for one in errors)
        if rank == 0:
            raised(job(exchanges.broadcast_unpicklable), "ConnectorContractError")
        assert job(exchanges.gather_own) == [[0, 1], [0, 1]]


def test_what_cannot_be_unpickled_ends_all(tmp_path: Path) -> None:
    with Job(2, tmp_path) as job:
        job.begin(exchanges.broadcast, ranks=[1])
        job.begin(exchanges.broadcast_unreadable, ranks=[0])
        assert job.answers([0])[0] is None  # it is told of in its next exchange
        [error] = raised(job.answers([1]), "ConnectorContractError")
        text = "rank 1 cannot unpickle what rank 0 sent: ValueError: planted"
        assert error.text == text
        [again] = raised(job(exchanges.gather_own, ranks=[0]), "ConnectorContractError")
        assert again.text == text


def test_a_rank_that_closed_is_named_by_those_only_that_wait_for_it(tmp_path: Path) -> None:
    with Job(3, tmp_path) as job:
        job(exchanges.gather_own)
        job(exchanges.leave, ranks=[2])
        assert job(exchanges.check, 0.3, ranks=[0, 1]) == [None, None]
        for one in raised(job(exchanges.gather_own, ranks=[0, 1]), "RankLost"):
            assert (one.rank, one.text) == (2, "rank 2 is lost: it closed its communicator")
        raised(job(exchanges.gather_own, ranks=[2]), "EngineClosed")


def test_a_collective_of_the_model_ends_with_a_rank_that_is_stopped(tmp_path: Path) -> None:
    """Without the watch, gloo would wait for it for the group's 30 seconds."""
    with Job(2, tmp_path, silence_s=SILENCE_S) as job:
        job.signal(1, signal.SIGSTOP)
        try:
            [error] = raised(job(exchanges.wait_in_default_group, ranks=[0]), "RankLost")
        finally:
            job.signal(1, signal.SIGCONT)
        assert error.rank == 1
        assert error.seconds < 30


@pytest.mark.parametrize("wait", [exchanges.gather_own, exchanges.wait_in_default_group])
def test_a_rank_that_fails_ends_what_waits_for_it(
    tmp_path: Path, wait: Callable[..., None]
) -> None:
    with Job(3, tmp_path) as job:
        job.begin(wait, ranks=[0, 2])
        assert job(exchanges.fail, ranks=[1]) == [None]
        errors = raised(job.answers([0, 2]), "ConnectorContractError")
        assert [one.text for one in errors] == ["rank 1: RuntimeError: planted"] * 2
        assert max(one.seconds for one in errors) < 30  # not as long as a rank may let others wait


def test_a_job_is_needed() -> None:
    with pytest.raises(ConfigurationError, match=r"call .*init_process_group first"):
        DistributedCommunicator()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_s": 0.0}, "timeout_s: 0.0 must be above 0"),
        ({"silence_s": 1.0}, "silence_s: 1.0 must be above 1"),
    ],
)
def test_wrong_arguments_are_refused_and_alone_a_rank_agrees_with_itself(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    store = dist.FileStore(str(tmp_path / "ranks"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match=message):
            DistributedCommunicator(**arguments)  # type: ignore[arg-type]
        with DistributedCommunicator() as alone:
            assert (alone.rank, alone.size) == (0, 1)
            assert alone.broadcast("one") == "one"
            assert alone.allgather("one") == ["one"]
    finally:
        dist.destroy_process_group()
