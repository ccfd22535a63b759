"""A metric, and one of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvconnect.prometheus.snapshot import Snapshot

__all__ = ["Metric", "Sample"]

Sample: TypeAlias = tuple[tuple[str, ...], float]
"""Values of a metric's labels, in its order, and its own."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name, its description, how it is read from a `Snapshot`, and its labels.

    As in Prometheus, counters are those whose name ends in ``_total``.
    """

    name: str
    help: str
    read: Callable[[Snapshot], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """The type in Prometheus."""
        return "counter" if self.name.endswith("_total") else "gauge"
