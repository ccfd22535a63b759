"""The settings of a tier, and what its chunks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
