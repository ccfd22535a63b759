"""``tiered:`` keeps the contract: memory before disk, in frames, which is what its tiers take."""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import quote

from kvconnect.backends import open_backend
from kvconnect.testing import BackendConformance
from kvconnect.testing.framed_values import FramedValues
from kvconnect.testing.subjects import TieredSubject


class TestTiered(BackendConformance):
    keeps_copies = TieredSubject.keeps_copies
    ends_cancelled = TieredSubject.ends_cancelled
    random_runs = 12  # three hundred of them: test_runner.py
    deadline_s = 0.1  # of calls that hang
    skip: ClassVar = TieredSubject.skip

    def make_backend(self):
        disk = f"disk://{self.tmp_path}/store?capacity=1GiB"
        tiers = ",".join(quote(tier, safe="") for tier in ("memory:?capacity=64MiB", disk))
        # A lookup of a busy machine would be a miss with less.
        return FramedValues(open_backend(f"tiered:?tiers={tiers}&patience=5s").inner)
