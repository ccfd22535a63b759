"""The parts of ``bench identity``, and how often each is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PARTS = ("weights", "canary", "wire", "vllm")
"""The names of the parts, in the order in which they are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityPlan:
    """The settings of a run.

    Attributes:
        parts: some of `PARTS`.
        dtype: of the model in memory; vLLM computes in float32.
        prompt_tokens: of a prompt that `PromptCache.prefill` or vLLM is given.
        repeats: number of repeats; the figures are medians.
        peer_python: an interpreter that has vLLM; ``None``: there is none.
    """

    parts: tuple[str, ...] = PARTS
    dtype: str = "bfloat16"
    prompt_tokens: int = 512
    repeats: int = 5
    peer_python: Path | None = None
