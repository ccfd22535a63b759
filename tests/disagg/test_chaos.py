"""Engines killed, frozen and restarted at random: nothing is wrong, nothing hangs, nothing is kept.

Two prefills and two decodes answer 64 clients at a time, some of which abort.
``KVCONNECT_CHAOS_SECONDS`` is how long each goes on, ``KVCONNECT_CHAOS_SEED`` what happens.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from chaos import CLIENTS, Chaos, Prompt
from engines import prompt_of
from fleet import FleetEngine

SECONDS = float(os.environ.get("KVCONNECT_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("KVCONNECT_CHAOS_SEED", "7"))
ROUND_S = 12.0
LENGTHS = (5, 17, 39, 71, 100, 150, 200)
SETTINGS = {
    "transfer": {"lease_s": 1.0, "claim_timeout_s": 1.0},
    "connector": {"load_timeout_s": 4.0, "save_timeout_s": 6.0},
    "max_num_tokens": 256,
}
POOL_TOKENS = 2048
SMALL_POOL_TOKENS = 768  # of a prefill: a block that is given up is soon another prompt's
MiB = 1 << 20


@pytest.fixture
def fleet(request, model_of) -> Iterator[dict[str, list[FleetEngine]]]:
    arch, transport, prefill_tokens = request.param
    pools = {"prefill": prefill_tokens, "decode": POOL_TOKENS}
    more = SETTINGS | {"transfer": SETTINGS["transfer"] | {"transport": transport}}
    engines = {
        role: [
            FleetEngine(f"{role} {number}", model_of(arch), role, more | {"max_tokens": tokens})
            for number in range(2)
        ]
        for role, tokens in pools.items()
    }
    started = []
    try:
        for engine in (*engines["prefill"], *engines["decode"]):
            engine.start()
            started.append(engine)
        yield engines
    finally:
        for engine in started:
            with suppress(OSError):
                engine.kill()


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS + 300)
@pytest.mark.parametrize(
    ("arch", "fleet"),
    [
        pytest.param(arch, (arch, transport, tokens), id=f"{arch}-{transport}")
        for arch, transport, tokens in (
            ("llama", "tcp", SMALL_POOL_TOKENS),
            ("llama", "nixl", POOL_TOKENS),
            ("gemma3", "tcp", POOL_TOKENS),
        )
    ],
    indirect=["fleet"],
)
def test_nothing_is_wrong_late_or_kept(arch, fleet, answer_of):
    prompts = [
        Prompt(tokens, answer_of(tokens, arch))
        for length in LENGTHS
        for tokens in (prompt_of(length, seed) for seed in range(4))
    ]
    chaos = Chaos(fleet["prefill"], fleet["decode"], prompts, SEED)

    async def run() -> None:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            await chaos.round(ROUND_S)

    try:
        asyncio.run(run())
    finally:
        print(f"{arch} seed {SEED}: {dict(sorted(chaos.counts.items()))}")
        print(f"slowest {chaos.slowest_s:.1f} s of {CLIENTS} at a time; {chaos.usage}")
    assert [engine.name for engines in fleet.values() for engine in engines if engine.died] == []
    assert chaos.counts["prompts fetched"] > chaos.counts["answers"] // 20
    for first, last in ((rounds[0], rounds[-1]) for rounds in chaos.usage.values()):
        assert last.threads <= first.threads + 2
        assert last.descriptors <= first.descriptors + 8
        assert last.nbytes <= first.nbytes + 64 * MiB
