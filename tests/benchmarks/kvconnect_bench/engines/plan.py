"""What `bench engines` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONNECTORS", "OURS", "TIERS", "EnginesPlan"]

CONNECTORS = ("none", "KvConnect", "KvConnectTier", "fs", "ExampleConnector", "LMCache")
"""Nothing; kvconnect's connector and its tier; vLLM's own tier and its example; LMCache's."""

OURS = ("KvConnect", "KvConnectTier")
"""Those of kvconnect."""

TIERS = ("KvConnectTier", "fs")
"""Those that vLLM's own offloading drives."""


@dataclass(frozen=True, slots=True)
class EnginesPlan:
    """What is asked for.

    Attributes:
        connectors: of `CONNECTORS`; each takes its turn in every round.
        prompt_tokens: of the prompt that is found again.
        steps: of decoding, with a connector that has nothing to do.
        repeats: restarts, and new prompts at each connector, of which the medians count.
    """

    connectors: tuple[str, ...]
    prompt_tokens: int
    steps: int
    repeats: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return self.prompt_tokens + self.steps + 64
