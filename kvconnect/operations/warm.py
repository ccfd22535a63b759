"""The verb ``warm``: computes and saves the blocks of prompts that a store lacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.keys import BlockKey
from kvconnect.operations.progress import Progress
from kvconnect.operations.result import Saved
from kvconnect.operations.visit import described, listed, visiting
from kvconnect.operations.which import WarmPrompt

if TYPE_CHECKING:
    from kvconnect.engine.llm import LLM

_AT_ONCE = 32
_PAUSE_S = 0.1
_SETTLE_S = 5.0
"""The seconds without a newly stored block after which the rest counts as lost."""


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
                known = described(store, list(new))
                absent = {key: new[key] async for key, entry in known if entry is None}
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


async def _compute(llm: LLM, prompts: Sequence[WarmPrompt]) -> None:
    room = asyncio.Semaphore(_AT_ONCE)

    async def compute(prompt: WarmPrompt) -> None:
        async with room:
            await llm.submit(
                {"prompt_token_ids": prompt.tokens},
                {"max_tokens": 0},
                cache_salt=prompt.salt,
                lora_id=prompt.lora,
            )
        progress.advance(len(prompt.tokens))

    total = sum(len(prompt.tokens) for prompt in prompts)
    async with Progress("warm", total, "tokens") as progress:
        running = [asyncio.create_task(compute(prompt)) for prompt in prompts]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


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
    async for key, entry in described(store, list(wanted)):
        if entry is not None:
            counted += 1
            done.blocks += 1
            done.bytes += entry.nbytes
            done.tokens += wanted.pop(key)
    return counted
