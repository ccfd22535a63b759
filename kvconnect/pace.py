"""Measures how fast a model computes and a store loads, and predicts both.

The logic has no clock and does no I/O: the caller measures. Not thread-safe.
"""

from __future__ import annotations

from math import ceil, isfinite

from kvconnect.fit import Fit

__all__ = ["LoadPace", "RunningLoad", "StepPace"]

_EXPLORE_EVERY = 100
"""Of the loads that a prediction rejects, one in so many is started all the same."""
_LATE, _SLACK_S = 1.25, 0.01
"""News is overdue after so many times the expected seconds, and so many more."""
_REACH = 4
"""Steps of up to so many times the tokens of the largest measured one are predictable."""


class StepPace:
    """The seconds of a model's step: ``a + b * tokens + c * tokens * context``.

    The context of a token is the number of tokens before it. A chunk from `start` to `end` has
    ``(start + end) / 2`` on average.
    """

    def __init__(self) -> None:
        self._fit = Fit(3, keep=0.8)
        self._largest = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Returns ``a``, ``b`` and ``c``; nothing before the second step."""
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

    The unit of an amount is the caller's (bytes, tokens, blocks), the same in every call.
    """

    def __init__(self) -> None:
        self._fit = Fit(2, keep=0.5, fastest=0.05)
        self._silence_s = 0.0
        self._num_rejected = 0
        self._piece = 0.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Returns seconds to the first byte and seconds per unit; nothing while unmeasured."""
        if not self._fit.num_records:
            return (self._silence_s, 0.0) if self._silence_s else ()
        first_byte_s, seconds_per_unit = self._fit.solve()
        return max(first_byte_s, self._silence_s), seconds_per_unit

    @property
    def piece(self) -> float:
        """Returns the amount that comes at once; 0 while unmeasured."""
        return self._piece

    def record(
        self, first: tuple[float, float], last: tuple[float, float], *, piece: float
    ) -> None:
        """Adds a load: its amount and its seconds by its first news and by its last.

        `piece` is its least news. A caller that looks rarely sees several pieces as one.
        """
        self._piece = min(piece, 1.25 * self._piece) if self._piece else piece
        self._silence_s = 0.0
        for amount, seconds in (first, last)[: 1 + (first != last)]:
            self._fit.record((1.0, amount), seconds)

    def record_silence(self, seconds: float) -> None:
        """Adds a load that brought nothing in `seconds`.

        The first byte is expected after as long again, the surer the more such loads follow each
        other.
        """
        first_byte_s = self.coefficients[0] if self.coefficients else 0.0
        if isfinite(seconds) and 2 * seconds > first_byte_s:
            self._silence_s = 0.7 * first_byte_s + 0.3 * 2 * seconds

    def predict(self, amount: float) -> float | None:
        """Returns the seconds of a load of `amount`; ``None`` while unmeasured."""
        if not self.coefficients:
            return None
        first_byte_s, seconds_per_unit = self.coefficients
        return first_byte_s + seconds_per_unit * amount

    def explores(self) -> bool:
        """Counts a load that a prediction rejects; returns whether to start it all the same."""
        self._num_rejected += 1
        return self._num_rejected % _EXPLORE_EVERY == 0


class RunningLoad:
    """The progress of one load of `total`, at least 1.

    All seconds are since the start of the load.

    Attributes:
        amount: the amount that is there.
    """

    def __init__(self, pace: LoadPace, total: float) -> None:
        self._pace = pace
        self._total = total
        self.amount = 0.0
        self._first = self._last = (0.0, 0.0)
        self._piece = pace.piece or total
        self._num_news = 0

    def progress(self, amount: float, seconds: float) -> None:
        """Reports that `amount` in all was there after `seconds`; ignored if that is no news."""
        if amount > self.amount:
            self._piece = min(self._piece, amount - self.amount)
            self.amount = amount
            self._last = (amount, seconds)
            if not self._num_news:
                self._first = self._last
            self._num_news += 1

    def end(self, seconds: float) -> None:
        """Adds the load, which ended or was given up after `seconds`, to the store's pace."""
        if self._num_news:
            self._pace.record(self._first, self._last, piece=self._piece)
        else:
            self._pace.record_silence(seconds)

    @property
    def is_measured(self) -> bool:
        """Returns whether the rate is known, of earlier loads or of this one."""
        return bool(self._pace.coefficients) or self._num_news > 1

    def overdue_after(self) -> float:
        """Returns the seconds after which the next news is clearly later than expected."""
        return _LATE * self._expected(0.0)[0] + _SLACK_S

    def rest(self, more: float, seconds: float) -> float:
        """Returns the seconds from `seconds` on until `more` has come than is there.

        News that is overdue is expected after as long again. That of an unmeasured load is overdue
        from the start, and brings everything.
        """
        if more <= 0:
            return 0.0
        news, end = self._expected(more)
        return max(0.0, end - min(seconds, news)) + max(0.0, seconds - news)

    def silence_for(self, rest: float, more: float, seconds: float) -> float:
        """Returns how long it takes in silence until the rest of `more` is `rest` or more."""
        news, end = self._expected(more)
        if end - min(seconds, news) >= rest:
            return 0.0
        return max(0.0, news + rest - max(0.0, end - news) - seconds)

    def _expected(self, more: float) -> tuple[float, float]:
        """Returns the seconds of the next news, and those at which `more` is there."""
        coefficients = self._pace.coefficients or self._own()
        start = self._last[1]
        if not coefficients:
            return start, start
        first_byte_s, rate = coefficients
        if self._num_news:
            # This load's own rate counts the more, the more of the load is there.
            weight = self._total / 4
            own_s = max(0.0, start - first_byte_s)
            rate = (own_s + weight * rate) / (self.amount + weight)
        else:
            start = first_byte_s
        left = self._total - self.amount
        come = min(ceil(more / self._piece) * self._piece, left)
        return start + min(self._piece, left) * rate, start + come * rate

    def _own(self) -> tuple[float, ...]:
        """Returns the coefficients by this load alone; nothing before its second news."""
        if self._num_news < 2:
            return ()
        (before, early), (amount, late) = self._first, self._last
        rate = max(0.0, late - early) / (amount - before)
        return max(0.0, early - before * rate), rate
