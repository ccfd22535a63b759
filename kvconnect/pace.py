"""Measures how fast a model computes and a store loads, and predicts both.

The logic has no clock and does no I/O: the caller measures. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite, sqrt

_EXPLORE_EVERY = 100
"""One in so many loads that a prediction rejects is started nevertheless."""
_EXPLORE_FIRST = 4
"""The number of the first rejected cheap load that is started; the next at twice the number."""
_LATE, _SLACK_S = 1.25, 0.01
"""The factor and the seconds beyond the expected time after which progress is overdue."""
_NUM_SLOW = 3
"""The number of slow loads in a row after which the store counts as slow."""
_SHORTEST_S = 1e-6
"""The resolution of a clock: a shorter measurement of a step counts as this long."""
_KEEP = 0.8
"""The weight of a step relative to the next one of its class."""
_RIDGES = (1e-9, 1e-9, 1e-3)
"""The ridge term of each feature: time that cannot be attributed is divided among a step and its
tokens. None goes to their context, which would make a long prompt's far too long."""
_TINY_S = 1e-9
"""A time shorter than the resolution of clocks."""
_REACH = 4
"""Steps of up to so many times the tokens of the largest measured one are predictable."""


class _Fit:
    """The duration of an operation, as a weighted sum of features with weights of 0 or more.

    The weights minimise the squared relative errors, so a measurement that is far too slow weighs
    next to nothing. A measurement that is far too fast counts as half the prediction. Older
    measurements fade with each newer one of their class only: a thousand small steps do not
    displace the last large one. Memory is bounded by the number of classes.
    """

    def __init__(self, num_features: int) -> None:
        self._num_features = num_features
        # For each class: the upper triangle of the normal equations' matrix, then the right side.
        self._classes: dict[int, list[float]] = {}
        self._solution: list[float] = []
        self._is_stale = False
        self.num_records = 0

    def record(self, features: Sequence[float], seconds: float, *, of_class: int) -> bool:
        """Adds a measurement; returns ``False`` if `seconds` is not a positive number."""
        if not (seconds > 0 and isfinite(seconds)):
            return False
        if self._solution:
            seconds = max(seconds, 0.5 * self.predict(features))
        seconds = max(seconds, _SHORTEST_S)
        row = [value / seconds for value in features]
        new = [left * right for i, left in enumerate(row) for right in row[i:]] + row
        old = self._classes.get(of_class)
        if old is not None:
            new = [_KEEP * before + value for before, value in zip(old, new, strict=True)]
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
                    [matrix[i][j] / scale[i] / scale[j] + _RIDGES[i] * (i == j) for j in chosen]
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


class StepPace:
    """The seconds of a model's step: ``a + b * tokens + c * tokens * context``.

    The context of a token is the number of tokens before it. A chunk from `start` to `end` has
    ``(start + end) / 2`` on average.
    """

    def __init__(self) -> None:
        self._fit = _Fit(3)
        self._largest = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Returns ``a``, ``b`` and ``c``; ``None`` before the second step."""
        return tuple(self._fit.solve()) if self._fit.num_records > 1 else ()

    @property
    def reach(self) -> int:
        """Returns the tokens of the largest step that can be predicted; 0 while unmeasured."""
        return self._largest * _REACH if self._fit.num_records > 1 else 0

    def record(self, tokens: int, tokens_times_context: float, seconds: float) -> None:
        """Adds a step of `tokens` tokens of all its requests together.

        Args:
            tokens: a step without any is ignored.
            tokens_times_context: the sum over the step's tokens of each one's context.
            seconds: a step that took none is ignored.
        """
        if tokens < 1:
            return
        features = (1.0, float(tokens), float(tokens_times_context))
        if self._fit.record(features, seconds, of_class=tokens.bit_length()):
            self._largest = max(self._largest, tokens)

    def predict(self, tokens: int, context: float) -> float | None:
        """Returns the seconds of a step whose tokens have `context`; ``None`` while unmeasured."""
        if not self.coefficients:
            return None
        return self._fit.predict((1.0, tokens, tokens * context))

    def seconds_for_prompt(self, start: int, end: int, chunk: int) -> float | None:
        """Returns the seconds of the steps for tokens `start` to `end`, `chunk` in each at most.

        ``None`` while unmeasured.
        """
        coefficients = self.coefficients
        if not coefficients:
            return None
        if end <= start:
            return 0.0
        a, b, c = coefficients
        tokens = end - start
        return a * -(-tokens // chunk) + (b + c * (start + end) / 2) * tokens


class LoadPace:
    """The seconds of a store's loads: ``first_byte_s + seconds_per_unit * amount``.

    A load within a factor of two of the estimate is averaged with it. A faster load replaces the
    estimate, in proportion to the part that was loaded. A slower one is ignored, unless it is the
    third in a row: then the store counts as slow. The unit of an amount is the caller's (bytes,
    tokens, blocks), the same in every call.

    Attributes:
        num_loads: the loads with progress that were added.
    """

    def __init__(self) -> None:
        self._measured: tuple[float, float] | None = None
        self._num_slow = 0
        self._silence_s = 0.0
        self._num_rejected = 0
        self.num_loads = 0
        self._piece = 0.0
        self._gap_s = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Returns seconds to the first byte and seconds per unit; ``None`` while unmeasured."""
        if self._measured is None:
            return (self._silence_s, 0.0) if self._silence_s else ()
        first_byte_s, seconds_per_unit = self._measured
        return max(first_byte_s, self._silence_s), seconds_per_unit

    @property
    def num_rejected(self) -> int:
        """Returns the loads that `explores` has counted since the store's pace changed."""
        return self._num_rejected

    @property
    def piece(self) -> float:
        """Returns the amount that arrives in one piece; 0 while unmeasured."""
        return self._piece

    @property
    def gap_s(self) -> float:
        """Returns the longest silence to expect between two pieces."""
        return self._gap_s

    def record(
        self,
        first: tuple[float, float],
        last: tuple[float, float],
        *,
        piece: float,
        gap_s: float,
        total: float,
    ) -> None:
        """Adds a load.

        Args:
            first: the amount and the seconds of its first progress.
            last: the amount and the seconds of its last progress.
            piece: its smallest progress. A caller that checks rarely sees several pieces as one.
            gap_s: the longest time between two reports of progress.
            total: the amount that was requested.
        """
        self.num_loads += 1
        self._piece = min(piece, 1.25 * self._piece) if self._piece else piece
        (before, early), (amount, late) = first, last
        old = self._measured
        if old is None or self._silence_s or 2 * late < old[0] + old[1] * amount:
            self._num_rejected = 0  # the store is another than it was
        self._silence_s = 0.0
        if old is not None and late > 2 * (old[0] + old[1] * amount):
            self._num_slow += 1
            if self._num_slow < _NUM_SLOW:
                return
        self._num_slow = 0
        self._gap_s = _mixed(self._gap_s, gap_s, 1.0)
        if amount > before:
            seconds_per_unit = max(0.0, late - early) / (amount - before)
            own = max(0.0, early - before * seconds_per_unit), seconds_per_unit
        elif old is not None and (expected := old[0] + old[1] * amount) > 0:
            own = old[0] * late / expected, old[1] * late / expected
        else:
            own = late / 2, late / 2 / amount
        if old is not None:
            share = amount / total
            own = _mixed(old[0], own[0], share), _mixed(old[1], own[1], share)
        self._measured = own

    def record_silence(self, seconds: float) -> None:
        """Adds a load without any progress in `seconds`.

        The first byte of the next load is then expected after twice `seconds`.
        """
        if isfinite(seconds):
            self._silence_s = max(self._silence_s, 2 * seconds)

    def predict(self, amount: float) -> float | None:
        """Returns the seconds of a load of `amount`; ``None`` while unmeasured."""
        if not self.coefficients:
            return None
        first_byte_s, seconds_per_unit = self.coefficients
        return first_byte_s + seconds_per_unit * amount

    def explores(self, *, soon: bool = False) -> bool:
        """Counts a load that a prediction rejects; returns whether to start it nevertheless.

        Args:
            soon: the load costs little even if it is too slow: some of the first hundred such loads
                are started.
        """
        self._num_rejected += 1
        number = self._num_rejected
        if soon and _EXPLORE_FIRST <= number < _EXPLORE_EVERY:
            return number.bit_count() == 1
        return number % _EXPLORE_EVERY == 0


def _mixed(old: float, new: float, share: float) -> float:
    """Returns the mean of `old` and `new`, which was measured on `share` of a load."""
    weight = 0.5 if new <= 2 * old and old <= 2 * new else max(0.5, share)
    return old + weight * (new - old)


class RunningLoad:
    """The progress of one load of `total`, at least 1.

    All seconds are since the start of the load.

    Attributes:
        amount: the amount that has been loaded.
    """

    def __init__(self, pace: LoadPace, total: float) -> None:
        self._pace = pace
        self._total = total
        self.amount = 0.0
        self._first = self._last = (0.0, 0.0)
        self._piece = pace.piece or total
        self._gap_s = 0.0
        self._num_news = 0

    def progress(self, amount: float, seconds: float) -> None:
        """Reports that `amount` in all was loaded after `seconds`; ignored unless it has grown."""
        if amount > self.amount:
            self._piece = min(self._piece, amount - self.amount)
            self.amount = amount
            if self._num_news:
                self._gap_s = max(self._gap_s, seconds - self._last[1])
            self._last = (amount, seconds)
            if not self._num_news:
                self._first = self._last
            self._num_news += 1

    def end(self, seconds: float) -> None:
        """Adds the load, which ended or was abandoned after `seconds`, to the store's pace."""
        if self._num_news:
            self._pace.record(
                self._first,
                self._last,
                piece=self._piece,
                gap_s=self._gap_s,
                total=self._total,
            )
        else:
            self._pace.record_silence(seconds)

    @property
    def is_measured(self) -> bool:
        """Returns whether the rate is known, from earlier loads or from this one."""
        return bool(self._pace.coefficients) or self._num_news > 1

    @property
    def num_earlier(self) -> int:
        """Returns the number of earlier loads that had progress."""
        return self._pace.num_loads

    def overdue_after(self) -> float:
        """Returns the seconds after which the next progress is clearly late."""
        return _LATE * self._expected(0.0)[1] + _SLACK_S

    def rest(self, more: float, seconds: float) -> float:
        """Returns the seconds from `seconds` on until `more` has arrived beyond `amount`.

        Progress that does not follow the rate is expected after the longest silence of earlier
        loads. Overdue progress is expected after as long again. The progress of an unmeasured load
        is overdue from the start, and is expected to complete the load.
        """
        if more <= 0:
            return 0.0
        news, latest, end = self._expected(more)
        if seconds < news - _TINY_S:
            return end - seconds
        return end - news + abs(latest - seconds)

    def silence_for(self, rest: float, more: float, seconds: float) -> float:
        """Returns the seconds of silence after which `self.rest` of `more` is at least `rest`."""
        if self.rest(more, seconds) >= rest:
            return 0.0
        news, latest, end = self._expected(more)
        if seconds < news and end - news + latest - news >= rest:
            return news - seconds
        return max(0.0, latest + rest - (end - news) - seconds)

    def _expected(self, more: float) -> tuple[float, float, float]:
        """Returns the seconds of the next progress by the rate, its latest, and those of `more`."""
        coefficients = self._pace.coefficients or self._own()
        start = self._last[1]
        if not coefficients:
            return start, start, start
        first_byte_s, rate = coefficients
        gap_s = 0.0
        if self._num_news:
            # This load's own rate counts the more, the more of the load is there.
            weight = self._total / 4
            own_s = max(0.0, start - first_byte_s)
            rate = (own_s + weight * rate) / (self.amount + weight)
            gap_s = self._pace.gap_s
        else:
            start = first_byte_s
        left = self._total - self.amount
        come = min(max(1, ceil(more / self._piece)) * self._piece, left)
        news = start + min(self._piece, left) * rate
        return news, max(news, start + gap_s), start + come * rate

    def _own(self) -> tuple[float, ...]:
        """Returns the coefficients by this load alone; ``None`` before its second progress."""
        if self._num_news < 2:
            return ()
        (before, early), (amount, late) = self._first, self._last
        rate = max(0.0, late - early) / (amount - before)
        return max(0.0, early - before * rate), rate
