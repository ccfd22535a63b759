"""The text of one token beside its log probability."""

from __future__ import annotations

from kvconnect.engine.request.logprobs import Logprob

__all__ = ["token_text"]


def token_text(token: int, logprob: Logprob) -> str:
    """Its text alone; its id as vLLM writes it, if the model has no tokenizer."""
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token
