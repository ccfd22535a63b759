"""Decides when a generation ends: tokens, strings, length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvconnect.engine.request.tokenizer import Detokenizer, Tokenizer
from kvconnect.request import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class StopStatus:
    """The result of one more token: text that is final now, and the end if it was the last one.

    Attributes:
        text: the text after that of the tokens before.
        finish_reason: set if it was the last one.
        stop_reason: the request's stop string or stop token that ended it.
    """

    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class StopChecker:
    """Follows one request's output: its text, and whether it has ended.

    Text that may be the beginning of a stop string is held back until that is decided.

    Args:
        params: the parameters of the request.
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
        self._named = frozenset(params.stop_token_ids)
        self._stop_strings = params.stop
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._max_tokens = params.max_tokens
        self._min_tokens = params.min_tokens
        self._count = 0
        self._held = ""

    def add(self, token: int) -> StopStatus:
        """Adds the generated `token`."""
        self._count += 1
        if token in self._stop_tokens and self._count >= self._min_tokens:
            reason = token if token in self._named else None
            return StopStatus(self._rest(self._held), "stop", reason)
        text = self._held + (self._detokenizer.add(token) if self._detokenizer else "")
        found = self._find(text)
        if found is None and self._count == self._max_tokens:
            text = self._rest(text)
            found = self._find(text)
        if found is not None:
            return StopStatus(text[: found[0]], "stop", found[1])
        if self._count == self._max_tokens:
            return StopStatus(text, "length")
        certain = len(text) - _beginning(text, self._stop_strings)
        self._held = text[certain:]
        return StopStatus(text[:certain], None)

    def abort(self) -> str:
        """Returns the text held back so far; no more text will come."""
        return self._rest(self._held)

    def _rest(self, text: str) -> str:
        return text + (self._detokenizer.finish() if self._detokenizer else "")

    def _find(self, text: str) -> tuple[int, str] | None:
        """Returns where the earliest stop string in `text` is, if ``min_tokens`` are reached.

        A stop string that ends within the text held back came before ``min_tokens`` and is ignored.
        """
        if self._count <= self._min_tokens:
            return None
        known = len(self._held)
        found = [
            (start, stop)
            for stop in self._stop_strings
            if (start := text.find(stop, max(0, known - len(stop) + 1))) >= 0
        ]
        return min(found, key=lambda one: one[0], default=None)


def _beginning(text: str, stops: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may begin one of `stops`."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
