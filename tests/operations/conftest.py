"""Fixtures of the tests of verbs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a store with room for what tests fill in."""
    return f"disk:{tmp_path}/kv?capacity=64MiB"
