"""Sums up times to the first token, over the prompts of a run that were partly in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Self

import numpy as np

from kvconnect.overlap import Decision
from kvconnect.simulate.first_token import ExternalHit, LoadRates

__all__ = ["FirstTokens", "Times", "first_token_rows"]

_WAYS = (
    ("loaded alone", "loaded"),
    ("better of the two", "better"),
    ("both meeting", "both"),
)


@dataclass(frozen=True, slots=True)
class Times:
    """The times of all prompts with one decision, in seconds."""

    mean: float
    median: float
    p90: float
    total: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Sums up `seconds`, at least one."""
        median, p90 = np.percentile(seconds, (50, 90))
        total = float(np.sum(seconds))
        return cls(total / len(seconds), float(median), float(p90), total)


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The times to the first token at one rate of the store.

    Attributes:
        rates: the rates of store and model.
        computed: times if all tokens are computed.
        loaded: times if all stored tokens are loaded.
        better: times with the better of these two for each prompt.
        both: times if, where that is better still, a load meets the computing.
        decisions: the number of prompts by decision.
    """

    rates: LoadRates
    computed: Times
    loaded: Times
    better: Times
    both: Times
    decisions: dict[Decision, int]

    @classmethod
    def of(cls, rates: LoadRates, hits: Sequence[ExternalHit]) -> Self:
        """Computes the times of `hits`, at least one."""
        found = [rates.first_token(hit) for hit in hits]
        decided = Counter(each.decision for each in found)
        return cls(
            rates=rates,
            computed=Times.of([each.computed_s for each in found]),
            loaded=Times.of([each.loaded_s for each in found]),
            better=Times.of([min(each.computed_s, each.loaded_s) for each in found]),
            both=Times.of([each.both_s for each in found]),
            decisions={decision: decided[decision] for decision in Decision},
        )

    def record(self) -> dict[str, object]:
        """Returns the object for JSON; an infinite rate is ``None``."""
        rates = {
            name: None if value == inf else value for name, value in asdict(self.rates).items()
        }
        return {
            **rates,
            "computed": asdict(self.computed),
            "loaded": asdict(self.loaded),
            "better": asdict(self.better),
            "both": asdict(self.both),
            "decisions": {str(decision): count for decision, count in self.decisions.items()},
        }


def first_token_rows(found: Sequence[FirstTokens]) -> list[tuple[str, ...]]:
    """Returns the cells of a table with a row for each of `found`, which share hits and model."""
    decisions = tuple(str(decision) for decision in Decision)
    head = ("first token", "mean", "median", "p90", "total", "of computed", *decisions)
    computed = found[0].computed
    blank = ("",) * len(decisions)
    rows: list[tuple[str, ...]] = [head, ("computed alone", *_cells(computed, computed), *blank)]
    for each in found:
        rows.append((f"store at {each.rates.label}/s", *[""] * (len(head) - 1)))
        counts = tuple(f"{count:,}" for count in each.decisions.values())
        for name, way in _WAYS:
            cells = _cells(getattr(each, way), computed)
            rows.append((f"  {name}", *cells, *(counts if way == "both" else blank)))
    return rows


def _cells(times: Times, computed: Times) -> tuple[str, ...]:
    share = f"{times.total / computed.total * 100:.1f} %" if computed.total else "-"
    seconds = (times.mean, times.median, times.p90, times.total)
    return (*(f"{value:,.3f} s" for value in seconds), share)
