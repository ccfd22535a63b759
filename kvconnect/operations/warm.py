"""The verb ``warm``: computes and saves the blocks of prompts that a store lacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.keys import BlockKey
from kvconnect.operations.progress import Progress
from kvconnect.operations.saving import Saved
from kvconnect.operations.visit import listed, visiting
from kvconnect.tokens import TokenArray

if TYPE_CHECKING:
    from kvconnect.engine.llm import LLM

__all__ = ["WarmPrompt", "check_store", "connector_to", "warm"]

_KEYS_PER_DESCRIBE = 256
_AT_ONCE = 32
_PAUSE_S = 0.1
_SETTLE_S = 5.0
"""The seconds without a newly stored block after which the rest counts as lost."""


@dataclass(frozen=True, slots=True, eq=False)
class WarmPrompt:
    """A prompt to compute: its tokens, and the tenant and adapter of its blocks."""

    tokens: TokenArray
    salt: str | None = None
    lora: str | None = None


def connector_to(url: str) -> KvCacheConnectorConfig:
    """Returns the connector settings of an engine that only warms `url` and may wait for it."""
    return KvCacheConnectorConfig(url=url, lookup_timeout_ms=60_000, on_backlog="wait")


async def check_store(url: str) -> None:
    """Checks that the store of `url` can be warmed, before a model is loaded for it.

    Raises:
        ConfigurationError: a bad URL, or a store that cannot list its blocks.
        BackendUnavailable: it cannot be reached.
    """
    async with visiting(url, "store") as store:
        listed(url, store)


async def warm(url: str, prompts: Sequence[WarmPrompt], llm: LLM, done: Saved) -> None:
    """Makes `llm` compute and save the blocks of `prompts` that the store of `url` lacks.

    A prompt that is stored is not computed. Of a model with several pool groups every prompt is
    given to `llm`, which loads what is stored. A repeated call after an interruption does the rest.

    Args:
        url: the URL of the store, which is the one of `llm`.
        prompts: the prompts.
        llm: computes and saves; the caller closes it.
        done: the counts are set once blocks are stored. Blocks, bytes and tokens are those that
            were stored meanwhile, of pool group 0 and the first rank.

    Raises:
        ConfigurationError: the store cannot list its blocks, or a prompt does not fit the model.
        BackendUnavailable: the store fails.
        EngineClosed: the engine accepts no more requests.
    """
    async with visiting(url, "store") as store:
        listed(url, store)
        done.opened = True
        wanted: dict[BlockKey, int] = {}
        left: list[WarmPrompt] = []
        async with Progress("look up", len(prompts), "prompts") as progress:
            for prompt in prompts:
                keys = await asyncio.to_thread(_keys_of, llm, prompt, store)
                new = {key: num for key, num in keys.items() if key not in wanted}
                absent = await _absent(store, new)
                done.present += len(new) - len(absent)
                wanted |= absent
                if any(key in wanted for key in keys) or len(llm.layouts) > 1:
                    left.append(prompt)
                done.missing += len(prompt.tokens) - sum(keys.values())
                progress.advance(1)
        before = done.missing
        try:
            await _compute(llm, left)
            await _settle(store, wanted, done)
        finally:
            await _count(store, wanted, done)
            done.missing = before + sum(wanted.values())
    done.complete = not wanted


def _keys_of(llm: LLM, prompt: WarmPrompt, store: Backend) -> dict[BlockKey, int]:
    keys = llm.store_keys(
        {"prompt_token_ids": prompt.tokens}, cache_salt=prompt.salt, lora_id=prompt.lora
    )
    if store.capabilities.variable_length:
        return keys
    return {key: num for key, num in keys.items() if num == llm.layout.tokens_per_block}


async def _absent(store: Backend, keys: dict[BlockKey, int]) -> dict[BlockKey, int]:
    absent: dict[BlockKey, int] = {}
    names = list(keys)
    for start in range(0, len(names), _KEYS_PER_DESCRIBE):
        piece = names[start : start + _KEYS_PER_DESCRIBE]
        known = zip(piece, await store.describe(piece), strict=True)
        absent |= {key: keys[key] for key, entry in known if entry is None}
    return absent


async def _compute(llm: LLM, prompts: Iterable[WarmPrompt]) -> None:
    several = list(prompts)
    running: set[asyncio.Task[None]] = set()
    total = sum(len(prompt.tokens) for prompt in several)
    async with Progress("warm", total, "tokens") as progress:
        try:
            for prompt in several:
                while len(running) >= _AT_ONCE:
                    running = await _next(running)
                running.add(asyncio.create_task(_compute_one(llm, prompt, progress)))
            while running:
                running = await _next(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _next(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Waits for one of `running` and returns the others; raises its error."""
    ended, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return left


async def _compute_one(llm: LLM, prompt: WarmPrompt, progress: Progress) -> None:
    await llm.submit(
        {"prompt_token_ids": prompt.tokens},
        {"max_tokens": 0},
        cache_salt=prompt.salt,
        lora_id=prompt.lora,
    )
    progress.advance(len(prompt.tokens))


async def _settle(store: Backend, wanted: dict[BlockKey, int], done: Saved) -> None:
    """Waits until the blocks of `wanted` are stored, or no further one arrives."""
    until = time.monotonic() + _SETTLE_S
    while wanted and time.monotonic() < until:
        if await _count(store, wanted, done):
            until = time.monotonic() + _SETTLE_S
        await asyncio.sleep(_PAUSE_S)


async def _count(store: Backend, wanted: dict[BlockKey, int], done: Saved) -> int:
    """Moves the blocks that are stored now from `wanted` to the counts of `done`."""
    counted = 0
    names = list(wanted)
    for start in range(0, len(names), _KEYS_PER_DESCRIBE):
        for entry in await store.describe(names[start : start + _KEYS_PER_DESCRIBE]):
            if entry is not None:
                counted += 1
                done.blocks += 1
                done.bytes += entry.nbytes
                done.tokens += wanted.pop(entry.key)
    return counted
