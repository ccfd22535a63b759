"""The outcomes of prompt tokens as a client may know them: ``usage.kvconnect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvconnect.engine.request.output import RequestOutput
from kvconnect.explain.outcome import Outcome, Span, merged

__all__ = ["explained"]


def explained(
    outputs: Sequence[RequestOutput], granularity: int, *, has_salt: bool
) -> dict[str, Any]:
    """Returns the explanation of each prompt of a request.

    A client learns nothing of prompts under other salts: ``namespace`` counts as ``new``. Without a
    salt it shares its cache with anybody. It then gets spans of whole blocks, and no cached text:
    otherwise it could read others' prompts token by token.

    Args:
        outputs: of each prompt.
        granularity: the end of each span is rounded down to a multiple of it, but for the last two.
        has_salt: the request has a salt.
    """
    return {"explain": [_one(output, granularity, has_salt=has_salt) for output in outputs]}


def _one(output: RequestOutput, granularity: int, *, has_salt: bool) -> dict[str, Any]:
    found = output.explain()
    spans = merged(_shown(span, has_salt=has_salt) for span in found.spans)
    most = output.prompt_tokens - 1
    if not has_salt:
        spans = merged(
            replace(
                span,
                start=_floor(span.start, granularity, most),
                end=_floor(span.end, granularity, most),
            )
            for span in spans
        )
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
    if there is not None:
        shown["divergence"] = {"position": _floor(there.position, granularity, most)}
        if has_salt:
            shown["divergence"] |= {
                "before": there.before,
                "prompt": there.prompt_text,
                "cached": there.cached_text,
            }
    return shown


def _shown(span: Span, *, has_salt: bool) -> Span:
    hidden = {Outcome.NAMESPACE} if has_salt else {Outcome.NAMESPACE, Outcome.TAIL}
    if span.outcome in hidden:
        return replace(span, outcome=Outcome.NEW, detail="")
    return span


def _floor(position: int, granularity: int, most: int) -> int:
    return position if position >= most else position - position % granularity
