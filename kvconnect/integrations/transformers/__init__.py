"""A prompt cache for ``model.generate()`` of plain transformers.

May import the engine's knowledge of models (geometry, position limits), the shared core, and what
that drives. Begin with `prompt_cache`; then `stored_cache` (the `transformers.Cache` of one call),
`passes` (which of them are saved), `rows` (a batch's prompts), `geometry`, `cache_layers`
with `snapshots` (recurrent layers), `identity` (what stands for the model in keys) and
`guard` (whether it still does).
"""

from __future__ import annotations

from kvconnect.integrations.transformers.prompt_cache import PromptCache
from kvconnect.integrations.transformers.stored_cache import StoredCache

__all__ = ["PromptCache", "StoredCache"]
