"""Fixtures of the engine's tests: engines on small models, and what transformers itself answers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FirstOfEquals, write_tiny
from observed import patient
from transformers import AutoModelForCausalLM

from kvconnect import LLM, KvCacheConfig
from kvconnect.engine.checkpoint.loading import LoadedModel, load_model
from kvconnect.engine.checkpoint.random_model import make_model

T = 16

Shelf = defaultdict[object, list[LoadedModel]]


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, Sequence[Sequence[int]], int], list[list[int]]]:
    """What ``transformers.generate()`` with its own cache answers, in float64, one by one."""

    @cache
    def model(directory: Path):
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, experts_implementation="eager"
        )

    @cache
    def answer(directory: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        for module in model(directory).modules():
            if hasattr(module, "conv1d_state"):  # Recurrent Gemma continues the call before
                module.conv1d_state = None
        out = model(directory).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        return out[0, len(prompt) :].tolist()

    def answers(directory: Path, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        kinds = getattr(model(directory).config, "layer_types", None) or ()
        with FirstOfEquals() if "indexed_attention" in kinds else nullcontext():
            return [answer(directory, tuple(prompt), n) for prompt in prompts]

    return answers


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts shorter and longer than a block, a window and a chunk; some share a prefix."""
    rng = np.random.default_rng(11)
    made = [rng.integers(0, 256, length).tolist() for length in (70, 33, 5, 16, 100, 1)]
    # One ends inside a block of another, one goes its own way inside a block.
    return [*made, made[4][:90], [*made[0][:50], 1, 2, 3]]


@pytest.fixture(scope="session")
def several(prompts: list[list[int]]) -> list[list[int]]:
    """Those of 70, 33, 5 and 16 tokens, and the one that leaves the first inside a block."""
    return [*prompts[:4], prompts[7]]


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma3 with windows of 24 in four of six layers, full attention in between."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return make_model(
        tmp_path_factory.mktemp("mixed"),
        "gemma3",
        num_layers=6,
        config_overrides={"layer_types": kinds},
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny model of a family, once; its configuration may have more fields."""

    @cache
    def write(family: str, **more: object) -> Path:
        return write_tiny(tmp_path_factory.mktemp(family), family, **more)

    return write


@pytest.fixture(scope="session")
def shelf() -> Shelf:
    """Models that were loaded before, by their files and how; those in use are not there."""
    return defaultdict(list)


@pytest.fixture
def open_llm(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Opens engines in float64 with blocks of 16 tokens; closes them at the end.

    A model is loaded once and then lent from test to test, to one engine at a time.
    """
    opened: list[LLM] = []
    lent: list[tuple[object, LoadedModel]] = []

    def lend(directory: Path, **how: object) -> LoadedModel:
        files = sorted((path.name, path.stat().st_mtime_ns) for path in directory.iterdir())
        key = (directory, *files, *how.items())
        loaded = shelf[key].pop() if shelf[key] else load_model(directory, **how)
        lent.append((key, loaded))
        return replace(loaded, model=copy.copy(loaded.model))  # tests change its methods

    monkeypatch.setattr("kvconnect.engine.assembly.load_model", lend)

    def open_one(model: Path, *, max_tokens: int = 1024, tokens_per_block: int = T, **more) -> LLM:
        config = KvCacheConfig(tokens_per_block=tokens_per_block, max_tokens=max_tokens)
        if isinstance(url := more.get("connector"), str):
            more["connector"] = patient(url)
        opened.append(LLM(model, **{"kv_cache": config, "dtype": "float64"} | more))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()
    for key, loaded in lent:
        shelf[key].append(loaded)


@pytest.fixture
def llm(open_llm: Callable[..., LLM], llama: Path) -> LLM:
    """An engine as it is by default."""
    return open_llm(llama)
