"""The settings of ``bench engines``."""

from __future__ import annotations

from dataclasses import dataclass

CONNECTORS = ("none", "KvConnect", "KvConnectTier", "fs", "ExampleConnector", "LMCache")
"""The connectors: none, kvconnect's and its tier, vLLM's own tier and its example, LMCache's."""

OURS = ("KvConnect", "KvConnectTier")
"""The connectors of kvconnect."""

TIERS = ("KvConnectTier", "fs")
"""The connectors that vLLM's own offloading drives."""


@dataclass(frozen=True, slots=True)
class EnginesPlan:
    """The settings of a run.

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
        """The tokens of the longest prompt and its answer."""
        return self.prompt_tokens + self.steps + 64
