"""The choice whether to load a prompt or to compute it, in engines that park a loading request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvconnect.overlap import Decision, LoadingPrompt, load_is_faster, predict_alone
from kvconnect.pace import LoadPace, RunningLoad, StepPace
from kvconnect.trace import count

_SURPRISES = 3
"""Loads in a row that are all over twice as slow as predicted, or all over twice as fast, after
which the loads before them are forgotten."""


@dataclass(slots=True, eq=False)
class PlannedLoad:
    """A load that `LoadChoice` chose.

    Attributes:
        num_tokens: the number of tokens to load.
        predicted_s: its predicted seconds; ``None``: loads are unmeasured.
        worth_s: the seconds that it may take and still be faster than computing, as predicted.
        explores: true if it is predicted to be slower than computing.
        started: the time of its start; set by `LoadChoice.start`.
    """

    num_tokens: int
    predicted_s: float | None = None
    worth_s: float = inf
    explores: bool = False
    started: float = 0.0


class LoadChoice:
    """Measures the steps and the loads of an engine, and predicts which is faster for a prompt.

    For an engine in which a request waits for its whole load. Thread-safe; no method blocks.

    A step's seconds count from its start, or from the end of the step before if that is later. So
    time in which the engine has nothing to do is in none of them.

    Args:
        tokens_per_block: the tokens per block of the store.
        max_tokens: the most tokens of a step.
        num_ahead: steps that the engine may start before the one before them has ended.
        decides: if false, every load is chosen.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        *,
        tokens_per_block: int,
        max_tokens: int,
        num_ahead: int = 0,
        decides: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self._max_tokens = max_tokens
        self._num_ahead = num_ahead
        self._decides = decides
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = StepPace()
        self._loads = LoadPace()
        self._running: deque[tuple[int, float, float]] = deque()
        self._ended_at = 0.0
        self._trusts = False  # the last load that was predicted to be slower was faster
        self._surprises: list[tuple[int, float]] = []
        self._off = 0  # the direction of all of these

    # ------------------------------------------------------------------ steps

    @property
    def num_running(self) -> int:
        """Returns the number of steps that have started and not ended."""
        return len(self._running)

    def begin_step(self, tokens: int, tokens_times_context: float) -> None:
        """Records the start of a step; see `kvconnect.pace.StepPace.record`.

        Steps that must have ended, but whose end was not reported, are dropped.
        """
        with self._lock:
            while len(self._running) > self._num_ahead:
                self._running.popleft()
            self._running.append((tokens, tokens_times_context, self._clock()))

    def end_step(self) -> None:
        """Records the end of the oldest running step, if there is one."""
        with self._lock:
            if not self._running:
                return
            tokens, tokens_times_context, started = self._running.popleft()
            now = self._clock()
            self._steps.record(tokens, tokens_times_context, now - max(started, self._ended_at))
            self._ended_at = now

    def record_step(self, tokens: int, tokens_times_context: float, seconds: float) -> None:
        """Records a step that was measured by the caller."""
        with self._lock:
            self._steps.record(tokens, tokens_times_context, seconds)

    # ------------------------------------------------------------------ loads

    def choose(
        self, start: int, match_end: int, prompt_end: int, *, num_rows: int = 1
    ) -> PlannedLoad | None:
        """Returns the load of tokens `start` to `match_end`; ``None``: computing them is faster.

        One in a hundred loads that are predicted to be slower is chosen nevertheless, and as many
        after it as prove to be faster. While steps or loads are unmeasured, every load is chosen.
        Counts the decision.

        Args:
            start: the computed tokens.
            match_end: the match end of the tokens that the store has.
            prompt_end: the last token is always computed.
            num_rows: prompts of this size, which load and compute together.
        """
        end = min(match_end, prompt_end - 1)
        prompt = LoadingPrompt(start, end, end, prompt_end, self.tokens_per_block)
        amount = num_rows * (match_end - start)
        with self._lock:
            planned = PlannedLoad(amount, self._loads.predict(amount))
            chosen = not self._decides or self._is_worth(planned, prompt, num_rows)
        decision = Decision.LOAD if chosen else Decision.COMPUTE
        count("engine.load", labels=(("decision", decision.value),))
        return planned if chosen else None

    def _is_worth(self, planned: PlannedLoad, prompt: LoadingPrompt, num_rows: int) -> bool:
        # For several rows, a share of the load is compared with computing one of them.
        share = planned.num_tokens / num_rows
        share_s = self._loads.predict(share)
        predicted = predict_alone(
            prompt, self._steps, self._loads, amount=share, max_tokens=self._max_tokens
        )
        if predicted is None or share_s is None:
            return True
        planned.worth_s = num_rows * (predicted.computed_s - predicted.loaded_s + share_s)
        planned.explores = predicted.decision is Decision.COMPUTE
        return self._trusts or load_is_faster(predicted, self._loads)

    def part(self, num_tokens: int, whole: PlannedLoad | None = None) -> PlannedLoad:
        """Returns a load of `num_tokens` that is a part of a chosen one.

        Args:
            num_tokens: the number of tokens to load.
            whole: the chosen load; ``None``: not known.
        """
        with self._lock:
            planned = PlannedLoad(num_tokens, self._loads.predict(num_tokens))
        if whole is not None:
            planned.explores = whole.explores
            planned.worth_s = whole.worth_s * num_tokens / whole.num_tokens
        return planned

    def start(self, load: PlannedLoad) -> None:
        """Records that `load` starts."""
        load.started = self._clock()

    def end(self, load: PlannedLoad, num_tokens: int) -> None:
        """Records that `load` has ended, with its first `num_tokens` loaded, and counts it."""
        took = self._clock() - load.started
        with self._lock:
            self._note_surprise(num_tokens, took)
            self._record(num_tokens, took)
            if len(self._surprises) == _SURPRISES:
                self._loads = LoadPace()
                for surprise in self._surprises:
                    self._record(*surprise)
                self._surprises.clear()
            if load.explores:
                self._trusts = num_tokens >= load.num_tokens and took < load.worth_s
        if load.predicted_s is not None:
            count("engine.load.predicted", seconds=load.predicted_s, took=took)

    def _note_surprise(self, num_tokens: int, took: float) -> None:
        """Collects loads that are all far slower than predicted, or all far faster."""
        expected = self._loads.predict(num_tokens) if num_tokens else None
        off = 0 if expected is None else (took > 2 * expected) - (took < expected / 2)
        if off != self._off:
            self._off = off
            self._surprises.clear()
        if off:
            self._surprises.append((num_tokens, took))

    def _record(self, num_tokens: int, took: float) -> None:
        running = RunningLoad(self._loads, max(1, num_tokens))
        running.progress(num_tokens, took)
        running.end(took)
