"""Fixtures of the planted identities."""

from __future__ import annotations

from collections.abc import Generator

import pytest


@pytest.fixture(autouse=True, scope="module")
def caches_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Without them, digests that a run with a planted fault kept would hide what a test shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield
