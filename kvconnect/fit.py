"""Fits a linear model of durations to measurements; each takes a few microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

__all__ = ["Fit"]

_SHORTEST_S = 1e-6
"""The resolution of a clock: a shorter measurement counts as this long."""
_RIDGE = 1e-9
"""The ridge term: divides time that cannot be attributed evenly among the features."""


class Fit:
    """The duration of an operation, as a weighted sum of features with weights of 0 or more.

    The weights minimise the squared relative errors, so a measurement that is far too slow weighs
    next to nothing. A measurement that is far too fast counts as `fastest` times the prediction.
    Older measurements fade with each newer one of their class only: a thousand small steps do not
    displace the last large one. Memory is bounded by the number of classes.
    """

    def __init__(self, num_features: int, *, keep: float, fastest: float = 0.5) -> None:
        self._num_features = num_features
        self._keep = keep
        self._fastest = fastest
        # For each class: the upper triangle of the normal equations' matrix, then the right side.
        self._classes: dict[int, list[float]] = {}
        self._solution: list[float] = []
        self._is_stale = False
        self.num_records = 0

    def record(self, features: Sequence[float], seconds: float, *, of_class: int = 0) -> bool:
        """Adds a measurement; returns ``False`` if `seconds` is not a positive number."""
        if not (seconds > 0 and isfinite(seconds)):
            return False
        if self._solution:
            seconds = max(seconds, self._fastest * self.predict(features))
        seconds = max(seconds, _SHORTEST_S)
        row = [value / seconds for value in features]
        new = [left * right for i, left in enumerate(row) for right in row[i:]] + row
        old = self._classes.get(of_class)
        if old is not None:
            keep = self._keep
            new = [keep * before + value for before, value in zip(old, new, strict=True)]
        self._classes[of_class] = new
        self.num_records += 1
        self._is_stale = True
        return True

    def predict(self, features: Sequence[float]) -> float:
        """Returns the predicted seconds, by the weights of the last `solve`."""
        return sum(part * value for part, value in zip(self._solution, features, strict=True))

    def solve(self) -> list[float]:
        """Returns the weights; computes them anew only after new measurements."""
        if self._is_stale:
            self._is_stale = False
            self._solution = self._solve([*map(sum, zip(*self._classes.values(), strict=True))])
        return self._solution

    def _solve(self, sums: list[float]) -> list[float]:
        size = self._num_features
        upper, target = iter(sums[:-size]), sums[-size:]
        matrix = [[0.0] * size for _ in range(size)]
        for i in range(size):
            for j in range(i, size):
                matrix[i][j] = matrix[j][i] = next(upper)
        # With a diagonal of ones; a feature that was always 0 has no coefficient.
        scale = [sqrt(matrix[i][i]) for i in range(size)]
        chosen = [i for i in range(size) if scale[i] > 0]
        while chosen:
            found = _gauss(
                [
                    [matrix[i][j] / scale[i] / scale[j] + _RIDGE * (i == j) for j in chosen]
                    + [target[i] / scale[i]]
                    for i in chosen
                ]
            )
            if min(found) >= 0:
                break
            del chosen[found.index(min(found))]
        solution = [0.0] * size
        for i, value in zip(chosen, found if chosen else (), strict=True):
            solution[i] = value / scale[i]
        return solution


def _gauss(rows: list[list[float]]) -> list[float]:
    """Solves the symmetric positive definite system of `rows`, the right side last, in place."""
    for i, pivot in enumerate(rows):
        for row in rows:
            if row is not pivot:
                factor = row[i] / pivot[i]
                for j in range(i, len(row)):
                    row[j] -= factor * pivot[j]
    return [row[-1] / row[i] for i, row in enumerate(rows)]
