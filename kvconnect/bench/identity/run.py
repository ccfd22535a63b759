"""Measures the parts of ``bench identity``, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kvconnect.bench.identity.canary import canary
from kvconnect.bench.identity.plan import IdentityPlan
from kvconnect.bench.identity.weights import weights
from kvconnect.bench.report import Figure

__all__ = ["MEASURES", "bench_identity"]

MEASURES: Mapping[str, Callable[[Path, IdentityPlan], list[Figure]]] = MappingProxyType(
    {"weights": weights, "canary": canary}
)
"""The function of each part, by its name in `kvconnect.bench.identity.plan.PARTS`."""


def bench_identity(model: Path, plan: IdentityPlan, tell: Callable[[str], object]) -> list[Figure]:
    """Returns the figures of all parts. Blocks for minutes.

    Args:
        model: directory.
        plan: what is asked for.
        tell: called with the name of each part before it is measured.
    """
    figures: list[Figure] = []
    for name in plan.parts:
        tell(name)
        figures += MEASURES[name](model, plan)
    return figures
