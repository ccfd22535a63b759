"""Measures naming a model by its content in memory, against loading it there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvconnect.bench.report import Figure
from kvconnect.bench.restart import forget_files
from kvconnect.config import torch_dtype
from kvconnect.digest.memory import content_of_tensors, module_tensors
from kvconnect.integrations.transformers.identity import identify
from kvconnect_bench.identity.plan import IdentityPlan

T = TypeVar("T")

_PAGE = 4096
_SETTLED_S = 2.5  # digests of files that changed since are not cached


def weights(model: Path, plan: IdentityPlan) -> list[Figure]:
    """Times loading from a cold page cache, then the content hash, then the whole name.

    Loading ends when every page of the weights is in memory: transformers maps files, and reads
    them later. The digest of the files themselves is made before, and cached for each file.
    """
    loaded, hashed, named, nbytes = [], [], [], 0
    newest = max(path.stat().st_ctime for path in model.rglob("*"))
    time.sleep(max(0.0, newest + _SETTLED_S - time.time()))
    identify(load(model, plan.dtype), None)
    for _ in range(plan.repeats):
        forget_files(model)
        seconds, made = timed(partial(_loaded, model, plan.dtype))
        loaded.append(seconds)
        hashed.append(timed(partial(content_of_tensors, module_tensors(made)))[0])
        named.append(timed(partial(identify, made, None))[0])
        nbytes = sum(one.nbytes for one in made.parameters())
        del made
    whole, digest, name = map(statistics.median, (loaded, hashed, named))
    return [
        Figure("weights", nbytes / 2**20, "MiB"),
        Figure("loading, cold", whole * 1e3, "ms"),
        Figure("content hash", digest * 1e3, "ms"),
        Figure("content hash / loading", digest / whole, "x", "<= 0.1"),
        Figure("name by the directory's files", name * 1e3, "ms"),
        Figure("name / loading", name / whole, "x", "<= 0.1"),
    ]


def load(model: Path, dtype: str) -> PreTrainedModel:
    """Returns the model of a directory, on the GPU if there is one."""
    made: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch_dtype(dtype), local_files_only=True
    )
    loaded: PreTrainedModel = made.to("cuda" if torch.cuda.is_available() else "cpu")
    return loaded


def _loaded(directory: Path, dtype: str) -> PreTrainedModel:
    """Loads the model, and reads every page of its weights."""
    model = load(directory, dtype)
    for one in model.parameters():
        flat = one.detach().reshape(-1)
        flat[:: max(1, _PAGE // one.element_size())].float().sum().item()
    return model


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Returns the seconds that `work` takes, on the GPU too, and its result."""
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result
