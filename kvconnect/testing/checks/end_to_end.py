"""Checks that a small model's tokens with any store equal its tokens without one."""

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
def model() -> Path:
    """Returns the directory of a small random model, made once a process.

    Raises:
        Unsupported: the engine is not installed.
    """
    try:
        from kvconnect.engine.checkpoint.random_model import make_model
    except ImportError as error:
        raise Unsupported(f"the engine is not installed ({error}): kvconnect[hf]") from None
    directory = Path(tempfile.mkdtemp(prefix="kvconnect-kit-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return make_model(directory / "model", num_layers=2)


def _generate(
    store: Backend | str | None, prompts: Sequence[str], ranks: int = 1, *, overlaps: bool = False
) -> list[RequestOutput]:
    """Returns an engine's answers with `store`, which ranks other than one open by its URL.

    Unless the engine `overlaps` loads with computing, it waits for all stored blocks of a slow
    store.
    """
    from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams

    connector = None
    if store is not None:
        name = "url" if isinstance(store, str) else "backend"
        connector = KvCacheConnectorConfig(
            **{name: store}, lookup_timeout_ms=10_000, overlap_loads=overlaps
        )
    with LLM(
        model(),
        kv_cache=KvCacheConfig(max_tokens=1024),
        connector=connector,
        dtype="float64",
        device="auto" if ranks == 1 else "cpu",  # there may be one GPU
        tensor_parallel_size=ranks,
    ) as llm:
        return llm.generate(list(prompts), SamplingParams(max_tokens=_MAX_TOKENS))


@cache
def _expected(prompts: tuple[str, ...]) -> list[list[int]]:
    return [list(output.output_token_ids) for output in _generate(None, prompts)]


def _prompts(subject: Subject, name: str) -> tuple[str, ...]:
    # New prompts, so that a reused medium holds none of their blocks.
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


@check("end to end", limit_s=180)
async def same_tokens_on_several_ranks(subject: Subject) -> None:
    """Blocks that one rank saved are loaded by several, and vice versa, with the same tokens."""
    if subject.ranks == 1:
        raise Unsupported("the engine has one rank: set `ranks`, or --tensor-parallel-size")

    def run() -> None:
        url, kept = subject.store_url(), subject.capabilities()
        for saved_by, loaded_by in ((1, subject.ranks), (subject.ranks, 1)):
            prompts = _prompts(subject, f"{saved_by} ranks")
            _compare(_generate(url, prompts, saved_by), prompts, f"{saved_by} ranks fill")
            again = _generate(url, prompts, loaded_by)
            _compare(again, prompts, f"{saved_by} ranks filled, on {loaded_by}")
            if kept.durable and kept.shared:
                reused = again[0].reused_store_tokens
                demand(reused, f"{loaded_by} ranks reuse nothing of what {saved_by} saved")

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
            # An engine that overlaps loads may compute a prompt before the store has answered.
            overlaps = state in ("lie", "truncate")
            _compare(_generate(faulty, prompts, overlaps=overlaps), prompts, f"does '{state}'")

    await asyncio.to_thread(run)
