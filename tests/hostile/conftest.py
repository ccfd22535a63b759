"""What the tests under attack share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from redis_server import own_redis  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nobody reads thousands of warnings."""
    logger = logging.getLogger("kvconnect")
    logger.disabled = True
    yield
    logger.disabled = False
