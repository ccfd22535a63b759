"""A clock that the tests of leases set."""

from __future__ import annotations

import pytest


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()
