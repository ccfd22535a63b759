"""The parts that adapters of several engines share. None of them depends on an engine.

Stands above the connector and may import everything up to it. An adapter drives the built-in pair
(`kvconnect.connector.pair`). It makes the pair's `LlmArgs` from the engine's configuration
(`settings`, `models`, `arguments`). It makes an `LlmRequest` from the engine's request (`requests`,
with `adapters` for the digests of LoRA adapters). It registers the engine's memory (`memory`).
Engines that call for blocks by themselves, whole prompts or page by page, use only
`kvconnect.connector.io`: its `blocking`. Begin with `settings`.
"""

from __future__ import annotations

from kvconnect.integrations.core.settings import EngineSettings

__all__ = ["EngineSettings"]
