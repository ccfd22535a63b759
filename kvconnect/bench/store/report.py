"""Renders the figures of a store, each beside its floor."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.bench.report import as_json_object, machine, median_ratio


@dataclass(frozen=True, slots=True)
class StoreFigure:
    """The result of one operation of one store.

    Attributes:
        store: its URL scheme.
        operation: put, get or lookup.
        how: ``bare``, ``guarded`` (through `open_backend`), or a peer's name.
        value_nbytes: bytes of each value.
        rate: bytes per second (lookups: keys per second); the median of the rounds.
        p50_ms, p99_ms: of calls with one value, or one lookup; ``None``: not measured.
        floor: the rate that `rate` is compared with; ``None``: there is none.
        floor_name: the name of that floor.
        ratio: `rate` / `floor`, the median of the rounds' own ratios.
    """

    store: str
    operation: str
    how: str
    value_nbytes: int
    rate: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    floor: float | None = None
    floor_name: str = ""
    ratio: float | None = None

    @classmethod
    def of(
        cls,
        named: tuple[str, str, str, int],
        rates: Sequence[float],
        *,
        floors: Sequence[float] = (),
        floor_name: str = "",
        latencies: Sequence[float] = (),
    ) -> StoreFigure:
        """Returns the figure of what was measured in each round.

        Args:
            named: store, operation, how and bytes of each value.
            rates: the rates of each round.
            floors: the floor's rates; empty: there is no floor.
            floor_name: the floor's name.
            latencies: seconds of single calls; empty: they were not measured.
        """
        p50, p99 = (
            percentile(latencies, percent) * 1e3 if latencies else None for percent in (50, 99)
        )
        return cls(
            *named,
            statistics.median(rates),
            p50,
            p99,
            statistics.median(floors) if floors else None,
            floor_name,
            median_ratio(rates, floors) if floors else None,
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest of `values` that so many percent of them do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def render(title: str, figures: Sequence[StoreFigure], *, as_json: bool = False) -> str:
    """Returns the figures as a table, or as one JSON object."""
    if as_json:
        return as_json_object(title, figures)
    width = max((len(figure.how) for figure in figures), default=0)
    head = f"  {'':>7}  {'':<6}  {'':<{width}}  {'rate':>14}  {'p50 ms':>8}  {'p99 ms':>8}"
    lines = [f"{title} ({machine()})", f"{head}  {'floor':>14}  ratio"]
    for figure in figures:
        lookup = figure.operation == "lookup"
        cells = [
            "" if lookup else f"{figure.value_nbytes / 2**20:g} MiB",
            f"{figure.operation:<6}",
            f"{figure.how:<{width}}",
            f"{_rate(figure.rate, lookup=lookup):>14}",
            f"{'' if figure.p50_ms is None else format(figure.p50_ms, '.3f'):>8}",
            f"{'' if figure.p99_ms is None else format(figure.p99_ms, '.3f'):>8}",
            f"{'' if figure.floor is None else _rate(figure.floor, lookup=lookup):>14}",
            f"{'' if figure.ratio is None else format(figure.ratio, '.2f'):>5}",
            figure.floor_name if figure.floor is not None else "",
        ]
        cells[0] = f"{cells[0]:>7}"
        lines.append("  " + "  ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _rate(rate: float, *, lookup: bool) -> str:
    return f"{rate / 1e3:,.0f}k keys/s" if lookup else f"{rate / 1e9:.2f} GB/s"
