"""The settings of a tier, what its chunks are, and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 32
WHOLE = 18 * BLOCK
"""Tokens of a prompt of 600 that are in whole blocks."""


def tier(directory: Path, scheme: str = "disk", capacity: str = "64MiB", **settings: Any) -> dict:
    return {
        "type": "KvConnectTier",
        "module_path": "kvconnect.integrations.vllm_tier",
        "url": f"{scheme}://{directory}?capacity={capacity}",
        **settings,
    }


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(3, 250, num_tokens).tolist()
