"""One token and its log probability, as JSON can say them."""

from __future__ import annotations

from kvconnect.engine.request.logprobs import Logprob

__all__ = ["token_text", "told_logprob"]

_NEVER = -9999.0
"""OpenAI's number for a token that cannot come: JSON has no infinity."""


def token_text(token: int, logprob: Logprob) -> str:
    """Its text alone; its id as vLLM writes it, if the model has no tokenizer."""
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def told_logprob(logprob: Logprob) -> float:
    """A finite number in any case."""
    return max(_NEVER, logprob.logprob)
