"""Counts the tokens of a request, as OpenAI does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvconnect.engine.request.output import RequestOutput

__all__ = ["counts", "usage_of"]


def usage_of(outputs: Sequence[RequestOutput], granularity: int) -> dict[str, Any]:
    """Returns OpenAI's ``usage`` of all prompts of a request together.

    ``cached_tokens`` are the prompt tokens that were not computed, wherever their KV came from.
    With several completions, the prompt tokens that each of them computed are subtracted.

    Args:
        outputs: of each prompt.
        granularity: the cached tokens of each prompt are rounded down to a multiple of it.
    """
    cached = 0
    for output in outputs:
        reused = max(0, output.prompt_tokens - output.computed_tokens)
        cached += reused - reused % granularity
    prompt = sum(output.prompt_tokens for output in outputs)
    answer = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return counts(prompt, answer) | {"prompt_tokens_details": {"cached_tokens": cached}}


def counts(prompt: int, answer: int) -> dict[str, Any]:
    """Returns the part of ``usage`` that is known at any time."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
    }
