"""A small model's tokens with the store in any state equal its tokens without one."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnect.backend import Backend
from kvconnect.testing.check import check, demand
from kvconnect.testing.faults.faulty_backend import BackendFault, FaultyBackend
from kvconnect.testing.subject import Subject, Unsupported

if TYPE_CHECKING:
    from kvconnect.engine.request.output import RequestOutput

_PROMPT = "The quick brown fox jumps over the lazy dog and runs away. "
_MAX_TOKENS = 8


@cache
def _model() -> Path:
    try:
        from kvconnect.engine.checkpoint.random_model import make_model
    except ImportError as error:
        raise Unsupported(f"the engine is not installed ({error}): kvconnect[hf]") from None
    directory = Path(tempfile.mkdtemp(prefix="kvconnect-kit-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_model(directory / "model", num_layers=2)


def _generate(store: Backend | None, prompts: Sequence[str]) -> list[RequestOutput]:
    from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams

    connector = None
    if store is not None:
        connector = KvCacheConnectorConfig(backend=store, lookup_timeout_ms=10_000)
    cache = KvCacheConfig(max_tokens=1024)
    with LLM(_model(), kv_cache=cache, connector=connector, dtype="float64") as llm:
        return llm.generate(list(prompts), SamplingParams(max_tokens=_MAX_TOKENS))


@cache
def _expected(prompts: tuple[str, ...]) -> list[list[int]]:
    return [list(output.output_token_ids) for output in _generate(None, prompts)]


def _prompts(subject: Subject, name: str) -> tuple[str, ...]:
    # Prompts of their own, so that a medium that is used again holds nothing of them yet.
    return (f"{subject.seed} {name}: {_PROMPT}" * 3,)


def _compare(outputs: list[RequestOutput], prompts: tuple[str, ...], state: str) -> None:
    for output, expected in zip(outputs, _expected(prompts), strict=True):
        right = list(output.output_token_ids) == expected
        demand(right, f"with a store that {state}, the model's tokens are others than without one")


@check("end to end", limit_s=120)
async def same_tokens_and_reuse(subject: Subject) -> None:
    """Tokens with the store equal those without; a second engine finds the first one's blocks."""

    def run() -> None:
        prompts = _prompts(subject, "reuse")
        _compare(_generate(subject.make_backend(), prompts), prompts, "is empty")
        again = _generate(subject.make_backend(), prompts)
        _compare(again, prompts, "has the prompt")
        if subject.capabilities().durable:
            reused = again[0].reused_store_tokens
            demand(reused, "a second engine on the same store reuses nothing")

    await asyncio.to_thread(run)


@check("end to end", limit_s=120)
async def same_tokens_whatever_fails(subject: Subject) -> None:
    """Tokens stay the same while the store lies, raises, flips bits, truncates or mixes up."""
    states: tuple[BackendFault, ...] = ("lie", "raise", "flip", "truncate", "swap", "deny")

    def run() -> None:
        prompts = _prompts(subject, "faults")
        _compare(_generate(subject.make_backend(), prompts), prompts, "is empty")
        for state in states:
            inner = subject.bare(subject.make_backend())
            faulty = FaultyBackend(inner, seed=subject.seed)
            faulty.set(state)
            _compare(_generate(faulty, prompts), prompts, f"does '{state}'")

    await asyncio.to_thread(run)
