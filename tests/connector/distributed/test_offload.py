"""The built-in pair on ranks that are processes, with one store for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_engine as rank
from job import Job
from rank_engine import PROMPT, expected, parts


@pytest.mark.parametrize(
    ("size", "stages"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 1), (2, 2)]
)
def test_every_rank_finds_its_part_after_a_restart(tmp_path: Path, size: int, stages: int) -> None:
    ranks, url = parts(size, stages=stages), f"disk://{tmp_path}/store?capacity=64MiB"
    with Job(size, tmp_path) as job:
        assert job(rank.attach_disk, ranks, url, {}) == [None] * size
        cold = job(rank.answer, PROMPT, 3)[0]
        assert job(rank.detach) == [None] * size
        job(rank.attach_disk, ranks, url, {})
        warm = job(rank.answer, PROMPT, 3)[0]
    assert cold == (expected(PROMPT, 3, ranks), 0)
    assert warm == (expected(PROMPT, 3, ranks), 4 * rank.T)
