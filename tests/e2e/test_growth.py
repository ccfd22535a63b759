"""10,000 requests through one engine leave nothing behind."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from growth import grow


def _run(model: Path, tmp_path: Path, requests: int, warm_up: int) -> None:
    """In a process of its own: in this one, what other tests left comes and goes."""
    child = multiprocessing.get_context("forkserver").Process(
        target=grow, args=(model, tmp_path, requests, warm_up)
    )
    child.start()
    child.join()
    assert child.exitcode == 0


def test_two_hundred_requests(model: Path, tmp_path: Path) -> None:
    _run(model, tmp_path, 200, 100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_requests(model: Path, tmp_path: Path) -> None:
    _run(model, tmp_path, 10_000, 1_000)
