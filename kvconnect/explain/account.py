"""The account of one prompt: which tokens were reused, and why the others were computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvconnect.explain.key_memory import Fingerprints
from kvconnect.explain.outcome import Divergence, Explanation, NotSaved, Outcome, Span, merged

_REASONS = (
    Outcome.NOT_LOADED,
    Outcome.DAMAGED,
    Outcome.FAILED,
    Outcome.LATE,
    Outcome.EVICTED,
    Outcome.SLOWER,
    Outcome.NO_STATE,
)
"""The reasons of a store or of the cache, the most precise one first."""


class PromptAccount:
    """The account of a prompt. Belongs to the engine's thread.

    A token counts as it became valid the first time: a preemption changes nothing.

    Attributes:
        num_tokens: the number of tokens of the prompt.
        is_explained: true once `explain` was called.
        divergence: the first token that differs from cached blocks, and the cached tokens from
            there on; ``None``: none is known.
        prints: the fingerprints of its blocks, in any namespace and in its own, and a flag: the
            last one is a part of a block.
        num_known: the estimated tokens that a cache without limits would have reused.
        ttl_s: the seconds that the store keeps its new blocks, as the request asked; ``None``: as
            long as all blocks.
        unsaved: the token from which on no block was saved, and the reason; ``None``: all were
            saved.
        when_unsaved: called with `unsaved` if it changes after the request's end.
    """

    __slots__ = (
        *("_base", "_losses", "_reached", "_refused", "_runs", "_why", "divergence"),
        *("is_explained", "num_known", "num_tokens", "prints", "ttl_s", "unsaved"),
        "when_unsaved",
    )

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.is_explained = False
        self.num_known = 0.0
        self.prints: tuple[Fingerprints, Fingerprints, bool] | None = None
        self.divergence: tuple[int, tuple[int, ...]] | None = None
        self.ttl_s: float | None = None
        self.unsaved: tuple[int, NotSaved] | None = None
        self.when_unsaved: Callable[[int, NotSaved], None] | None = None
        self._runs: list[tuple[int, bool]] = []  # the ends of runs of tokens, and if reused
        self._reached = 0
        self._refused: tuple[int, NotSaved] | None = None  # the first block not to be saved
        self._losses: dict[Outcome, int] = {}
        self._base = 0
        self._why: Sequence[Span] = ()

    # ------------------------------------------------------------------ what happens to it

    def reach(self, end: int, *, reused: bool) -> None:
        """Records that the tokens before `end` are valid; new ones are reused if `reused`."""
        end = min(end, self.num_tokens)
        if end > self._reached:
            if self._runs and self._runs[-1][1] == reused:
                self._runs.pop()
            self._runs.append((end, reused))
            self._reached = end

    def lose(self, reason: Outcome, end: int) -> None:
        """Records that tokens before `end` were not loaded for `reason`; later calls overwrite."""
        self._losses[reason] = end

    def lack_states(self, end: int) -> None:
        """Notes that the keys and values before `end` are there, but no recurrent states.

        If it is called several times before `explain`, the largest `end` counts. Later ones are of
        another admission, whose tokens were computed before.
        """
        if not self.is_explained:
            end = max(end, self._losses.get(Outcome.NO_STATE, 0))
            self._losses[Outcome.NO_STATE] = end

    def keep(self, reason: Outcome) -> None:
        """Reverts `lose` of `reason`."""
        self._losses.pop(reason, None)

    def has_lost(self, reason: Outcome) -> bool:
        """Returns whether `lose` was called for `reason`."""
        return reason in self._losses

    def not_saved(self, position: int, why: NotSaved) -> None:
        """Notes that no block from that of token `position` on reached the store."""
        if why.is_final and (self._refused is None or position < self._refused[0]):
            self._refused = (position, why)
        if self.unsaved is None or position < self.unsaved[0]:
            self.unsaved = (position, why)
            if self.when_unsaved is not None:
                self.when_unsaved(position, why)

    def saved_after_all(self) -> None:
        """Takes `not_saved` back, except for blocks that are not to be saved."""
        self.unsaved = self._refused

    def explain(self, base: int, why: Sequence[Span]) -> None:
        """Sets the reasons for the tokens from `base` on, in case they are computed.

        Args:
            base: the end of the tokens that the cache or the store has.
            why: spans of reasons without gaps, from `base` on.
        """
        self._base, self._why, self.is_explained = base, why, True

    # ------------------------------------------------------------------ the result

    def reused_from_start(self) -> int:
        """Returns how many leading tokens were reused."""
        return self._runs[0][0] if self._runs and self._runs[0][1] else 0

    def spans(self) -> tuple[Span, ...]:
        """Returns spans of the whole prompt, in order and without gaps."""
        return merged(self._spans())

    def explanation(self) -> Explanation:
        """Returns the spans and the divergence, without texts."""
        spans = self.spans()
        diverged = any(span.outcome is Outcome.DIVERGED for span in spans)
        if self.divergence is None or not diverged:
            return Explanation(spans)
        return Explanation(spans, Divergence(*self.divergence))

    def _spans(self) -> Iterator[Span]:
        start, last = 0, self.num_tokens - 1
        for end, reused in self._runs:
            if reused:
                yield Span(start, end, Outcome.REUSED)
            else:
                yield from self._computed(start, min(end, last))
                if end > last:
                    yield Span(last, end, Outcome.LAST)
            start = end
        yield Span(start, self.num_tokens, Outcome.UNREACHED)

    def _computed(self, start: int, end: int) -> Iterator[Span]:
        for reason in _REASONS:
            stop = min(end, self._losses.get(reason, 0))
            if start < stop:
                # A more precise reason may end earlier than a less precise one.
                yield Span(start, stop, reason)
                start = stop
        if start < min(end, self._base):
            yield Span(start, min(end, self._base), Outcome.SLOWER)
            start = self._base
        for span in self._why:
            low, high = max(start, span.start), min(end, span.end)
            if low < high:
                yield Span(low, high, span.outcome, span.detail)
                start = high
        yield Span(start, end, Outcome.NEW)
