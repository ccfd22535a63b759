"""``memory:`` keeps the contract."""

from __future__ import annotations

from kvconnect.testing import BackendConformance
from kvconnect.testing.subjects import MemorySubject


class TestMemory(MemorySubject, BackendConformance):
    deadline_s = 0.1  # of calls that hang
