"""The outcomes of prompt tokens, and spans of tokens that share one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby

_TOKENS_SHOWN = 16
"""The most tokens of each text around the place where a prompt leaves what is cached."""


class Outcome(StrEnum):
    """The outcome of a prompt token. Each token has exactly one.

    All but the first two and the last two are *lost*: computed although they might have been
    reused. One more reason is one more line here: metrics and answers list all members.
    """

    REUSED = "reused"  # its KV came from the device's cache, the host tier, a store or a peer
    NEW = "new"  # no cache of this engine or its stores had this prefix, as far as is remembered
    DIVERGED = "diverged"  # a shorter prefix is cached, which continues with another token
    NAMESPACE = "namespace"  # the same tokens are cached under another salt, adapter or key
    EVICTED = "evicted"  # it was cached, and dropped for room
    EXPIRED = "expired"  # it was stored, and its time in the store was over
    NOT_SAVED = "not_saved"  # it was computed before, and never reached the store
    NOT_LOADED = "not_loaded"  # the request, or a hook of its connector, refused loads
    LATE = "late"  # the store did not answer in time
    FAILED = "failed"  # the store failed, or was not called after earlier failures
    DAMAGED = "damaged"  # the stored block was damaged
    SLOWER = "slower"  # loading would have taken longer than computing
    NO_STATE = "no_state"  # its keys and values are there, but no recurrent states at their end
    TAIL = "tail"  # less than a block, which the store does not keep or the cache does not divide
    LAST = "last"  # the last token is always computed
    LOGPROBS = "logprobs"  # the request needs the log probabilities of its prompt
    UNREACHED = "unreached"  # the request ended before the token was computed


class NotSaved(StrEnum):
    """The reason why a block did not reach the store: the detail of `Outcome.NOT_SAVED`."""

    BELOW_MIN_PRIORITY = "below min_priority"
    BACKLOG = "backlog"
    FAILED = "save failed"
    UNAVAILABLE = "store unavailable"
    REQUEST = "refused by the request"
    HOOK = "refused by a hook"
    HOOK_FAILED = "hook failed"

    @property
    def is_final(self) -> bool:
        """Returns whether it was decided that the block is not saved, and no end of it changes."""
        return self not in {NotSaved.BACKLOG, NotSaved.FAILED, NotSaved.UNAVAILABLE}


LOST = frozenset(Outcome) - {Outcome.REUSED, Outcome.NEW, Outcome.UNREACHED}
"""The outcomes of tokens that were computed although they might have been reused."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens ``start..end`` of a prompt, which share one outcome.

    Attributes:
        start: the first token.
        end: the first token behind the span.
        outcome: the outcome of the tokens.
        detail: more about the reason, such as why blocks were not saved; may be empty.
    """

    start: int
    end: int
    outcome: Outcome
    detail: str = ""

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Divergence:
    """The place where a prompt leaves what is cached in its own namespace.

    Attributes:
        position: the first token that differs.
        cached: tokens that are cached from there on, at most one block.
        before: the text before it; empty without a tokenizer.
        prompt_text: the prompt's text from there on.
        cached_text: the cached text from there on.
    """

    position: int
    cached: tuple[int, ...]
    before: str = ""
    prompt_text: str = ""
    cached_text: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The outcomes of a prompt's tokens.

    Attributes:
        spans: in order, without gaps; together they are the whole prompt.
        divergence: the place where it leaves what is cached; ``None`` if it leaves nothing.
    """

    spans: tuple[Span, ...] = ()
    divergence: Divergence | None = field(default=None, repr=False)

    @property
    def tokens(self) -> dict[Outcome, int]:
        """The number of tokens of each outcome that occurs; the sum is the prompt's length."""
        counts: dict[Outcome, int] = {}
        for span in self.spans:
            counts[span.outcome] = counts.get(span.outcome, 0) + len(span)
        return counts


def with_texts(
    found: Divergence, prompt: Sequence[int], decode: Callable[[list[int]], str]
) -> Divergence:
    """Returns `found` with the texts on both sides, of `prompt` and of what is cached."""
    at, tokens = found.position, list(prompt)
    return replace(
        found,
        before=decode(tokens[max(0, at - _TOKENS_SHOWN) : at]),
        prompt_text=decode(tokens[at : at + _TOKENS_SHOWN]),
        cached_text=decode(list(found.cached[:_TOKENS_SHOWN])),
    )


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Returns `spans` with neighbours of one outcome and detail as one, without empty ones."""
    found = []
    wanted = (span for span in spans if span.end > span.start)
    for (outcome, detail), run in groupby(wanted, key=lambda span: (span.outcome, span.detail)):
        parts = list(run)
        found.append(Span(parts[0].start, parts[-1].end, outcome, detail))
    return tuple(found)
