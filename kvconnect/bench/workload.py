"""The model and the prompts that the benchmarks run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvconnect.tokens import TokenArray


def bench_model(directory: Path | None, scratch: Path) -> Path:
    """Returns the user's model, or makes a random Llama of 46 million parameters in `scratch`."""
    if directory is not None:
        return directory
    from kvconnect.engine.checkpoint.random_model import make_model

    target = scratch / "model"
    make_model(target, "llama", preset="demo")
    return target


@contextmanager
def model_and_scratch(model: Path | None, directory: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yields `bench_model`, and a folder in `directory` that is deleted at the end."""
    with tempfile.TemporaryDirectory(dir=directory) as name:
        yield bench_model(model, Path(name)), Path(name)


def random_prompt(num_tokens: int, seed: int) -> TokenArray:
    """Returns random token ids that every byte-level tokenizer has."""
    return np.random.default_rng(seed).integers(1, 250, num_tokens, dtype=np.int32)
