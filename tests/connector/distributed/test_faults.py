"""A rank that fails, is slow, diverges or dies, while the others go on or end with its name."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import rank_engine as rank
from job import Job, Raised
from rank_engine import PROMPT, expected, parts


def url(folder: Path) -> str:
    return f"disk://{folder}/store?capacity=64MiB"


def filled(job: Job, folder: Path, **settings: object) -> None:
    """A job whose ranks have saved `PROMPT`, and have an engine that has computed nothing."""
    ranks = parts(job.size)
    job(rank.attach_disk, ranks, url(folder), settings)
    job(rank.answer, PROMPT, 1)
    job(rank.detach)
    job(rank.attach_disk, ranks, url(folder), settings)


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_what_one_rank_cannot_load_all_compute(tmp_path: Path, broken: int) -> None:
    with Job(2, tmp_path) as job:
        filled(job, tmp_path)
        job(rank.break_store, ranks=[broken])
        assert job(rank.answer, PROMPT, 3)[0] == (expected(PROMPT, 3, parts(2)), 0)
        assert job(rank.failed_loads, ranks=[0]) == [1]
        assert job(rank.blocks_held, ranks=[0]) == [0]


def test_ranks_that_diverge_raise_at_once(tmp_path: Path) -> None:
    with Job(4, tmp_path) as job:
        job(rank.attach_recorder, parts(4), {})
        job(rank.submit, PROMPT, 9, ranks=[0])
        job(rank.step)
        job(rank.diverge, ranks=[2])
        errors = job(rank.step)
        assert [one.name for one in errors] == ["RankDivergence"] * 4
        assert max(one.seconds for one in errors) < 30  # not as long as a rank may let others wait


@pytest.mark.parametrize(("dead", "size"), [(0, 2), (1, 4)])
def test_a_rank_that_dies_ends_the_others_in_time(tmp_path: Path, dead: int, size: int) -> None:
    prompts = [[number, *PROMPT] for number in range(20)]
    with Job(size, tmp_path) as job:
        job(rank.attach_disk, parts(size), url(tmp_path), {})
        job.begin(rank.work_for_ever, prompts, ranks=range(size))
        job.signal(dead, signal.SIGKILL)
        died = time.monotonic()
        errors = job.answers(other for other in range(size) if other != dead)
        assert time.monotonic() - died < 30
        assert all(isinstance(one, Raised) for one in errors)
        assert {(one.name, one.rank) for one in errors} == {("RankLost", dead)}
    with Job(size, tmp_path) as job:  # and the engine can be made again
        job(rank.attach_disk, parts(size), url(tmp_path), {})
        assert job(rank.answer, PROMPT, 3)[0][0] == expected(PROMPT, 3, parts(size))


@pytest.mark.slow
def test_what_a_killed_rank_was_saving_counts_as_far_as_all_have_it(tmp_path: Path) -> None:
    """Fifty kills of one rank in the middle of saves: no answer is ever wrong."""
    ranks, draw = parts(2), random.Random(15)
    for kill in range(50):
        prompts = [[kill, number, *PROMPT * 3] for number in range(8)]
        with Job(2, tmp_path) as job:
            job(rank.attach_disk, ranks, url(tmp_path), {})
            job.begin(rank.work_for_ever, prompts, ranks=range(2))
            time.sleep(draw.uniform(0, 0.15))
            job.signal(kill % 2, signal.SIGKILL)
            [error] = job.answers([1 - kill % 2])
            assert (error.name, error.rank) == ("RankLost", kill % 2)
        with Job(2, tmp_path) as job:
            job(rank.attach_disk, ranks, url(tmp_path), {})
            for prompt in prompts:
                assert job(rank.answer, prompt, 2)[0][0] == expected(prompt, 2, ranks)
            assert job(rank.failed_loads, ranks=[0]) == [0]
