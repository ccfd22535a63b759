"""``disk:`` keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvconnect.testing import BackendConformance
from kvconnect.testing.subjects import DiskSubject


class TestDisk(DiskSubject, BackendConformance):
    __init__ = object.__init__

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path):
        self.directory = tmp_path / "store"
