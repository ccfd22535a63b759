"""A tiny model, a prompt, and ways to run it: what the end-to-end tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from observed import patient

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.backend import Backend
from kvconnect.engine.request.output import RequestOutput

T = 16
PROMPT = [int(token) for token in np.random.default_rng(7).integers(1, 250, 203)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


Store = str | Backend | KvCacheConnectorConfig | None


def connector(store: str | Backend, **more: object) -> KvCacheConnectorConfig:
    """A store that is waited for, on a busy machine too; nothing is computed that it has."""
    return patient(store, **{"save_timeout_s": 60} | more)


def open_llm(
    model: Path,
    store: Store = None,
    *,
    tokens_per_block: int = T,
    max_tokens: int = 2048,
    **more: Any,
) -> LLM:
    """An engine in float64 with room for a few prompts; it waits for its store."""
    cache = KvCacheConfig(tokens_per_block=tokens_per_block, max_tokens=max_tokens)
    if isinstance(store, str | Backend):
        store = connector(store)
    return LLM(model, kv_cache=cache, connector=store, **{"dtype": "float64"} | more)


def answer(
    model: Path, store: Store = None, prompt: list[int] = PROMPT, **how: Any
) -> RequestOutput:
    """Start, answer `prompt`, stop: what was staged is saved when this returns."""
    with open_llm(model, store, **how) as llm:
        return llm.generate([prompt], PARAMS)[0]


def disk_url(directory: Path, capacity: str = "64MiB") -> str:
    """The disk store in `directory`."""
    return f"disk://{directory}?capacity={capacity}"


def store_files(directory: Path) -> list[Path]:
    """Every file of a store, in a fixed order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())
