"""``disk:`` keeps the contract."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvconnect.testing import BackendConformance
from kvconnect.testing.processes import children
from kvconnect.testing.subjects import DiskSubject


class TestDisk(DiskSubject, BackendConformance):
    __init__ = object.__init__
    random_runs = 12  # three hundred of them: test_runner.py
    deadline_s = 0.1  # of calls that hang

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path):
        self.directory = tmp_path / "store"

    def test_no_lock_of_a_dead_process_is_left(self):
        work = {"name": "dead", "nbytes": 4096, "batch": 2, "count": 8, "point": "written"}
        children.start(self, "save", **work).wait()
        assert len(list(self.directory.glob("owner-*"))) == 1

        async def reopen():
            async with self.opened():
                return len(list(self.directory.glob("owner-*")))

        assert asyncio.run(reopen()) == 1
        assert not list(self.directory.glob("owner-*"))
