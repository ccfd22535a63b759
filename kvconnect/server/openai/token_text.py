"""Encodes one token and its log probability for JSON."""

from __future__ import annotations

from kvconnect.engine.request.logprobs import Logprob

__all__ = ["token_text", "told_logprob"]

_NEVER = -9999.0
"""The number of OpenAI for an impossible token: JSON has no infinity."""


def token_text(token: int, logprob: Logprob) -> str:
    """Returns its text alone; without a tokenizer its id as vLLM writes it."""
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def told_logprob(logprob: Logprob) -> float:
    """Returns a log probability that is finite in any case."""
    return max(_NEVER, logprob.logprob)
