"""A clock for a `LoadChoice`, which tests turn: what a model and a store take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvconnect import trace as trace_module
from kvconnect.integrations.core.load_choice import LoadChoice

TOKEN_S = 0.001
"""What a model takes for a token."""
FAST, SLOW = TOKEN_S / 8, TOKEN_S * 8
"""Seconds of a store for a token."""


at_two_speeds = pytest.mark.parametrize(
    ("token_s", "asked", "decided"),
    [(SLOW, [1, 0, 0, 0], {"load": 1, "compute": 3}), (FAST, [1, 1, 1, 1], {"load": 4})],
    ids=["slow", "fast"],
)
"""Prompts of which the store is asked for each (1) or not (0); a slow one until it is measured."""


class LoadClock:
    """Seconds that pass only where a test lets them.

    Attributes:
        token_s: of the store.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.token_s = FAST

    def __call__(self) -> float:
        return self.now

    def set_in(self, choice: LoadChoice) -> None:
        choice._clock = self

    def computes(self, num_tokens: float = 1) -> None:
        self.now += num_tokens * TOKEN_S

    def times(self, load: Callable[..., Any], num_tokens: Callable[..., float]) -> Any:
        """`load`, which takes the store's time for as many tokens as its arguments stand for."""

        def timed(*arguments: Any) -> Any:
            self.now += num_tokens(*arguments) * self.token_s
            return load(*arguments)

        return timed


def decisions() -> dict[str, float]:
    """How often each was counted in this process."""
    return {
        dict(labels)["decision"]: counters["engine.load"]
        for labels, counters in trace_module.metrics.by_labels().items()
        if "engine.load" in counters
    }


class Decisions:
    """Those since the last call."""

    def __init__(self) -> None:
        self._before = decisions()

    def __call__(self) -> dict[str, float]:
        before, self._before = self._before, decisions()
        return {
            name: total - before.get(name, 0)
            for name, total in self._before.items()
            if total > before.get(name, 0)
        }
