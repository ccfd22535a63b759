"""LMCache beside ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvconnect.bench.store_payloads import StorePlan
from kvconnect.bench.store_report import StoreFigure

__all__ = ["bench_peer"]


def bench_peer(
    url: str, plan: StorePlan, python: Path | None, tell: Callable[[str], None]
) -> list[StoreFigure]:
    """None yet."""
    return []
