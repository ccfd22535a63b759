"""When a generation ends: tokens, strings, length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvconnect.engine.request.tokenizer import Detokenizer, Tokenizer
from kvconnect.request import SamplingParams

__all__ = ["FinishReason", "StopChecker", "StopStatus"]

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class StopStatus:
    """What one more token brought: text that is certain now, and whether it was the last one."""

    text: str
    finish_reason: FinishReason | None


class StopChecker:
    """Follows one request's output: its text, and whether it has ended.

    Text that may turn out to begin a stop string is held back until it is certain.

    Args:
        params: of the request.
        eos_token_ids: the model's own end-of-sequence tokens.
        tokenizer: without one there is no text.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        own = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_tokens = own | frozenset(params.stop_token_ids)
        self._stop_strings = params.stop
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._left = params.max_tokens
        self._held = ""

    def add(self, token: int) -> StopStatus:
        """`token` was generated."""
        self._left -= 1
        if token in self._stop_tokens:
            return StopStatus(self._rest(self._held), "stop")
        text = self._held + (self._detokenizer.add(token) if self._detokenizer else "")
        found = _first(text, self._stop_strings)
        if found is not None:
            return StopStatus(text[:found], "stop")
        if self._left == 0:
            return self._at_length(text)
        certain = len(text) - _beginning(text, self._stop_strings)
        self._held = text[certain:]
        return StopStatus(text[:certain], None)

    def abort(self) -> str:
        """The text held back so far; nothing more will come."""
        return self._rest(self._held)

    def _at_length(self, text: str) -> StopStatus:
        rest = self._rest(text)
        found = _first(rest, self._stop_strings)
        return StopStatus(rest, "length") if found is None else StopStatus(rest[:found], "stop")

    def _rest(self, text: str) -> str:
        return text + (self._detokenizer.finish() if self._detokenizer else "")


def _first(text: str, stops: Sequence[str]) -> int | None:
    """Where the earliest of `stops` begins in `text`."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(places, default=None)


def _beginning(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may begin one of `stops`."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
