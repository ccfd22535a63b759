"""What requests hold is saved when the engine is closed under them, also with save_on=finish."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from harness import open_llm
from late_store import LateStore
from observed import slow

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.backend import StoredBlock

T = 16
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
FEW, MANY = 4 * 2 * (4096 + (1 << 13)), 64 << 20
"""Bytes of staging memory: four slots, and many."""


class SlowBackend(LateStore):
    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        await asyncio.sleep(0.002 * len(blocks))
        return await super().save(blocks)


@pytest.mark.parametrize(
    ("save_on", "staging_bytes", "on_backlog", "num_tokens"),
    [
        # Every two of the four meet.
        ("finish", FEW, "drop", 1),
        ("finish", MANY, "wait", 20),
        ("full", FEW, "wait", 20),
        ("full", MANY, "drop", 1),
        *slow(*product(("finish", "full"), (FEW, MANY), ("drop", "wait"), (1, 20))),
    ],
)
def test_every_block_of_running_requests_is_saved(
    model: Path, save_on: str, staging_bytes: int, on_backlog: str, num_tokens: int
) -> None:
    store = SlowBackend()
    config = KvCacheConnectorConfig(
        backend=store,
        save_on=save_on,
        staging_bytes=staging_bytes,
        on_backlog=on_backlog,
        lookup_timeout_ms=60_000,
        save_timeout_s=60,
    )
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 250, length).tolist() for length in (5, 16, 70, 90, 130)]
    with open_llm(model, config, max_tokens=4096) as llm:
        handles = [llm.submit(prompt, LONG) for prompt in prompts]
        for handle in handles:
            seen = 0
            for chunk in handle.stream():
                seen += len(chunk.token_ids)
                if seen >= num_tokens:
                    break
    said = [[*p, *h.result(0).output_token_ids] for p, h in zip(prompts, handles, strict=True)]
    with open_llm(model) as llm:
        expected = [output.output_token_ids for output in llm.generate(said, SHORT)]
    with open_llm(model, store) as llm:
        for tokens, answer in zip(said, expected, strict=True):
            again = llm.generate([tokens], SHORT)[0]
            assert again.output_token_ids == answer
            # The last token was never fed back.
            assert again.reused_store_tokens >= (len(tokens) - 1) // T * T
