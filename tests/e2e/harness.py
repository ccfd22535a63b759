"""A tiny model, a prompt, and ways to run it: what the end-to-end tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.backend import Backend
from kvconnect.engine.request.output import RequestOutput

T = 16
PROMPT = [int(token) for token in np.random.default_rng(7).integers(1, 250, 203)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def open_llm(
    model: Path,
    store: str | Backend | KvCacheConnectorConfig | None = None,
    *,
    tokens_per_block: int = T,
    dtype: str = "float64",
    max_tokens: int = 2048,
) -> LLM:
    """An engine with room for a few prompts; patient with its store on a busy machine.

    It computes nothing that the store has.
    """
    cache = KvCacheConfig(tokens_per_block=tokens_per_block, max_tokens=max_tokens)
    patience = {
        "lookup_timeout_ms": 60_000,
        "load_timeout_s": 60,
        "save_timeout_s": 60,
        "overlap_loads": False,
    }
    if isinstance(store, str):
        store = KvCacheConnectorConfig(url=store, **patience)
    elif isinstance(store, Backend):
        store = KvCacheConnectorConfig(backend=store, **patience)
    return LLM(model, kv_cache=cache, connector=store, dtype=dtype)


def answer(
    model: Path,
    store: str | Backend | KvCacheConnectorConfig | None = None,
    *,
    prompt: list[int] = PROMPT,
    tokens_per_block: int = T,
    dtype: str = "float64",
) -> RequestOutput:
    """Start, answer `prompt`, stop: what was staged is saved when this returns."""
    with open_llm(model, store, tokens_per_block=tokens_per_block, dtype=dtype) as llm:
        return llm.generate([prompt], PARAMS)[0]


def disk_url(directory: Path, capacity: str = "64MiB") -> str:
    """The disk store in `directory`."""
    return f"disk://{directory}?capacity={capacity}"


def store_files(directory: Path) -> list[Path]:
    """Every file of a store, in a fixed order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())
