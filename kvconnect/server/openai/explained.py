"""The outcomes of prompt tokens that a client may see: ``usage.kvconnect``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvconnect.engine.request.output import RequestOutput
from kvconnect.explain.outcome import Outcome, Span, merged

__all__ = ["explained"]

_OF_THE_REQUEST = frozenset({Outcome.LAST, Outcome.LOGPROBS, Outcome.UNREACHED})
"""The outcomes that depend on no other request."""
_OTHERS = frozenset({Outcome.NAMESPACE})
"""The outcomes that would reveal other tenants' prompts."""
_FINE = _OTHERS | {Outcome.TAIL, Outcome.DIVERGED}
"""These outcomes, and those that would reveal single tokens of prompts without a salt."""


def explained(
    outputs: Sequence[RequestOutput], granularity: int, *, has_salt: bool
) -> dict[str, Any]:
    """Returns the explanation of each prompt of a request.

    The result reveals nothing about prompts under other salts: ``namespace`` counts as ``new``. A
    request without a salt shares its cache with all such requests, and its result covers whole
    blocks only: otherwise a client could find out others' prompts token by token. Then ``diverged``
    and ``tail`` count as ``new``, as does the part of a block before the last token, and no
    divergence is shown.

    Args:
        outputs: the outputs of each prompt.
        granularity: for requests without a salt, the tokens of a block, to which ends of spans are
            rounded down.
        has_salt: true if the request has a salt.
    """
    return {"explain": [_one(output, granularity, has_salt=has_salt) for output in outputs]}


def _one(output: RequestOutput, granularity: int, *, has_salt: bool) -> dict[str, Any]:
    found = output.explain()
    if has_salt:
        spans = merged(_shown(span, _OTHERS) for span in found.spans)
    else:
        spans = merged(_in_blocks(found.spans, granularity, output.prompt_tokens - 1))
    tokens: dict[str, int] = {}
    for span in spans:
        tokens[span.outcome] = tokens.get(span.outcome, 0) + len(span)
    shown: dict[str, Any] = {
        "tokens": tokens,
        "spans": [
            {"start": span.start, "end": span.end, "outcome": span.outcome}
            | ({"detail": span.detail} if span.detail else {})
            for span in spans
        ],
    }
    there = found.divergence
    if has_salt and there is not None:
        shown["divergence"] = {
            "position": there.position,
            "before": there.before,
            "prompt": there.prompt_text,
            "cached": there.cached_text,
        }
    return shown


def _in_blocks(spans: Sequence[Span], size: int, last: int) -> Iterator[Span]:
    """Yields `spans` rounded to whole blocks; `last` is the last token."""
    end = last - last % size
    for span in spans:
        low, high = min(span.start, end), min(span.end, end)
        yield replace(_shown(span, _FINE), start=low - low % size, end=high - high % size)
    for span in spans:
        rest = replace(span, start=max(span.start, end))
        yield rest if rest.outcome in _OF_THE_REQUEST else _new(rest)


def _shown(span: Span, hidden: frozenset[Outcome]) -> Span:
    return _new(span) if span.outcome in hidden else span


def _new(span: Span) -> Span:
    return replace(span, outcome=Outcome.NEW, detail="")
