"""The pytest plug-in: registers the markers of the conformance kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_MARKERS = (
    "kvconnect(group): a check of kvconnect's backend conformance kit",
    "kvconnect_root: one that mounts file systems; skipped loudly without root",
)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers, also for ``--strict-markers``."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
