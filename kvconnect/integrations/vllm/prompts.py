"""What of a vLLM request shapes its KV, and whether kvconnect can tell it apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from kvconnect.integrations.core.requests import PromptContent

__all__ = ["contents_of", "tokens_of", "uncached_because"]

_HASH = re.compile(r"[0-9a-f]{40,128}")


def uncached_because(request: Any) -> str | None:
    """Why nothing of `request` can be cached, for the log; ``None`` if it can."""
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt embeddings"
    if request.prompt_token_ids is None or getattr(request, "prompt_is_token_ids", None):
        return "prompt embeddings"
    if getattr(request, "resumable", False):
        return "streaming input, which takes tokens back"
    for feature in getattr(request, "mm_features", None) or ():
        if _HASH.fullmatch(_identifier(feature)) is None:
            return (
                "inputs with an identifier of the user's own, which says nothing of their content"
            )
    adapter = getattr(request, "lora_request", None)
    if adapter is not None and getattr(adapter, "load_inplace", False):
        return "a LoRA adapter that replaces another in place"
    return None


def tokens_of(request: Any) -> Sequence[int]:
    """All tokens of `request`, not to be changed: of a new one the prompt itself, uncopied."""
    prompt: Sequence[int] = request.prompt_token_ids
    known: int = request.num_tokens
    return prompt if len(prompt) == known else request.all_token_ids[:known]


def contents_of(request: Any) -> list[PromptContent]:
    """Pictures, sounds and the like: where in the prompt they stand, and their hashes."""
    return [
        PromptContent(
            feature.mm_position.offset,
            feature.mm_position.length,
            f"{feature.modality}:{_identifier(feature)}".encode(),
        )
        for feature in getattr(request, "mm_features", None) or ()
    ]


def _identifier(feature: Any) -> str:
    # Without the prefix of an adapter, which the namespace holds.
    return str(getattr(feature, "mm_hash", None) or feature.identifier)
