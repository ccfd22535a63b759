"""The time to the first token of a prompt in a store: computed, loaded, or both until they meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import NamedTuple, Self

import numpy as np

from kvconnect.errors import ConfigurationError
from kvconnect.overlap import Decision, FirstToken, meeting


class ExternalHit(NamedTuple):
    """A prompt of which the store has a part that the engine has not.

    Attributes:
        tokens: the tokens of that part; at least 1.
        rest: tokens after it, which no tier has; at least 1.
    """

    tokens: int
    rest: int


@dataclass(frozen=True, slots=True)
class LoadRates:
    """The speed of a store beside that of a model.

    A load fills whole blocks, the last one first. Computing fills them from the first one on. The
    two meet between two blocks, at the place that makes the later of them earliest.

    Attributes:
        label: the store's rate as the user wrote it.
        load_tokens_per_s: the store's rate.
        prefill_tokens_per_s: prompt tokens that the model computes in a second; ``inf``: at once.
        tokens_per_block: at least 1.
        store_first_byte_s: seconds until a load's first byte.
        step_s: seconds that each step takes beside its tokens.
        step_tokens: prompt tokens of a step at most; ``None``: no limit.

    Raises:
        ConfigurationError: names the field, the value and what is right.
    """

    label: str
    load_tokens_per_s: float
    prefill_tokens_per_s: float
    tokens_per_block: int
    store_first_byte_s: float = 0.0
    step_s: float = 0.0
    step_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.load_tokens_per_s > 0:
            raise ConfigurationError(f"store_rate: {self.label} must be above 0")
        for name in ("store_first_byte_s", "step_s"):
            value: float = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise ConfigurationError(f"{name}: {value} must be a number of seconds, 0 or more")
        if self.step_tokens is not None and self.step_tokens < 1:
            raise ConfigurationError(f"step_tokens: {self.step_tokens} must be at least 1")

    def first_token(self, hit: ExternalHit) -> FirstToken:
        """Returns the seconds after `hit`. Of equal ways, the one that moves least is chosen."""
        blocks = -(-hit.tokens // self.tokens_per_block)
        rest_s = self.compute_s(hit.rest)
        computed_s = self.compute_s(hit.tokens + hit.rest)
        loaded_s = self.load_s(blocks) + rest_s
        met_s = self._meeting_s(blocks) + rest_s
        both_s = min(computed_s, loaded_s, met_s)
        decision = Decision.BOTH
        if computed_s == both_s:
            decision = Decision.COMPUTE
        elif loaded_s == both_s:
            decision = Decision.LOAD
        return FirstToken(computed_s, loaded_s, both_s, decision)

    def compute_s(self, num_tokens: int) -> float:
        """Returns the seconds of the steps that compute `num_tokens`, at least 1."""
        steps = 1 if self.step_tokens is None else -(-num_tokens // self.step_tokens)
        return steps * self.step_s + num_tokens / self.prefill_tokens_per_s

    def load_s(self, num_blocks: int) -> float:
        """Returns the seconds until `num_blocks`, at least 1, are loaded."""
        num_tokens = num_blocks * self.tokens_per_block
        return self.store_first_byte_s + num_tokens / self.load_tokens_per_s

    def _meeting_s(self, blocks: int) -> float:
        """Returns the seconds until `blocks` are filled from both ends, by each at least one."""
        if blocks < 2:
            return inf

        # The load brings one block at least.
        _, seconds = meeting(
            blocks - 1,
            lambda count: self.compute_s(count * self.tokens_per_block),
            lambda count: self.load_s(blocks - count),
        )
        return seconds


_WAYS = (("loaded alone", "loaded"), ("better of the two", "better"), ("both meeting", "both"))


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
