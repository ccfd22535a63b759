"""The model and the prompts that the benchmarks run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvconnect.tokens import TokenArray

__all__ = ["bench_model", "random_prompt"]


def bench_model(directory: Path | None, scratch: Path) -> Path:
    """Returns the user's model, or makes a random Llama of 46 million parameters in `scratch`."""
    if directory is not None:
        return directory
    from kvconnect.engine.checkpoint.random_model import make_model

    target = scratch / "model"
    make_model(target, "llama", preset="demo")
    return target


def random_prompt(num_tokens: int, seed: int) -> TokenArray:
    """Returns random token ids that every byte-level tokenizer has."""
    return np.random.default_rng(seed).integers(1, 250, num_tokens, dtype=np.int32)
