"""The inputs of a vLLM request that shape its KV, and whether keys can name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvconnect.digest.doubts import Doubt

__all__ = ["doubt_of", "tokens_of"]


def doubt_of(request: Any) -> Doubt | None:
    """Returns why `request` cannot be cached, whatever its contents are; ``None`` if it can."""
    if getattr(request, "prompt_embeds", None) is not None:
        return Doubt.EMBEDDINGS
    if request.prompt_token_ids is None or getattr(request, "prompt_is_token_ids", None):
        return Doubt.EMBEDDINGS
    if getattr(request, "resumable", False):
        return Doubt.STREAMING
    adapter = getattr(request, "lora_request", None)
    if adapter is not None and getattr(adapter, "load_inplace", False):
        return Doubt.ADAPTER_UNKNOWN
    return None


def tokens_of(request: Any) -> Sequence[int]:
    """Returns all tokens of `request`, not to be changed; for a new one its prompt, uncopied."""
    prompt: Sequence[int] = request.prompt_token_ids
    known: int = request.num_tokens
    return prompt if len(prompt) == known else request.all_token_ids[:known]
