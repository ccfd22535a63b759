"""Engines of random settings, one after the other on one store: answers are as without any reuse.

Models with recurrent layers, and models that compute attention themselves; with drafts, loads and
saves, preemption, several ranks, and requests that are aborted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from observed import check_rest, preempt, tokens
from parrot import EAGER, Parrot, draft_with

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams

RECURRENT = [
    "qwen3_next",
    "lfm2",
    "mamba",
    "minimax",
    "falcon_h1",
    "jamba",
    "mamba2",
    "kimi_linear",
]
OWN_ATTENTION = [
    "falcon",
    "llama4_text",
    "bloom",
    "gpt_neo",
    "doge",
    "gptj",
    "diffllama",
    "codegen",
]
RUNS = [
    *((family, 1) for family in [*RECURRENT, *OWN_ATTENTION]),
    # transformers says of Mamba not how ranks divide it.
    *((family, 2) for family in RECURRENT if not family.startswith("mamba")),
]


class Dice:
    """Random choices by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one_of(self, *these: Any) -> Any:
        return these[int(self.rng.integers(len(these)))]

    def settings(self, size: int, ranks: int, url: str) -> dict[str, Any]:
        """Arguments of an engine with blocks of `size` tokens, of up to `ranks` ranks."""
        cache = {
            "tokens_per_block": size,
            "state_interval": size * self.one_of(1, 2, 4),
            "max_tokens": self.one_of(192, 256, 512),
            "host_cache_size": self.one_of(0, 600_000),
            "enable_partial_reuse": self.one_of(True, False),
            "copy_on_partial_reuse": self.one_of(True, False),
        }
        chunked = self.one_of(True, True, False)
        store = KvCacheConnectorConfig(
            url=url,
            lookup_timeout_ms=self.one_of(1, 60_000),
            load_timeout_s=60,
            staging_bytes=8 << 20,
            overlap_loads=self.one_of(True, False),
            save_on=self.one_of("full", "finish"),
        )
        return {
            "kv_cache": KvCacheConfig(**cache),
            "connector": self.one_of(store, store, None),
            "speculative": self.one_of(EAGER, EAGER, None),
            "enable_chunked_prefill": chunked,
            "max_num_tokens": self.one_of(1, 7, 13, 24, 64) if chunked else 70,
            "max_batch_size": self.one_of(1, 2, 4, 8),
            "scheduling": self.one_of("guaranteed_no_evict", "max_utilization"),
            "tensor_parallel_size": self.one_of(1, ranks, ranks),
            "device": "cpu",
            "dtype": "float64",
        }

    def prompts(self, known: list[list[int]]) -> list[list[int]]:
        """Four prompts of at most 70 tokens that begin like some of `known`."""
        found = []
        for _ in range(4):
            stem = known[self.rng.integers(len(known))]
            stem = stem[: self.rng.integers(len(stem) + 1)]
            more = self.rng.integers(0, 3, self.rng.integers(1, 20)).tolist()
            found.append([*stem, *more][-70:])
        return found

    def preempts(self, llm: LLM) -> None:
        """Sends requests back after some steps, each at most four times."""
        rate, times = self.one_of(0, 0.05, 0.2), dict[int, int]()

        def when(request: Any) -> bool:
            number = times.get(request.request_id, 0)
            if number == 4 or self.rng.random() >= rate:
                return False
            times[request.request_id] = number + 1
            return True

        preempt(llm, when)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "ranks"), RUNS)
def test_answers_are_those_without_reuse(family, ranks, tiny, open_llm, tmp_path):
    dice, known = Dice(len(family) + 100 * ranks), [[]]
    size = dice.one_of(2, 4, 16)
    fresh = open_llm(
        tiny(family), kv_cache=KvCacheConfig(max_tokens=2048, enable_block_reuse=False)
    )
    for _ in range(3):
        settings = dice.settings(size, ranks, f"disk://{tmp_path}/kv?capacity=64MiB")
        with LLM(tiny(family), **settings) as llm:
            dice.preempts(llm)
            for _ in range(5):
                prompts = dice.prompts(known)
                params = SamplingParams(max_tokens=int(dice.rng.integers(1, 14)), ignore_eos=True)
                expected = tokens(fresh.generate(prompts, params))
                whole = [[*one, *more] for one, more in zip(prompts, expected, strict=True)]
                if settings["speculative"]:
                    drafter = Parrot(whole, dice.one_of(0, 2, 3), count=dice.one_of(1, 3, 20))
                    draft_with(llm, drafter)
                if dice.one_of(True, False):
                    streams = [llm.stream(one, params) for one in prompts]
                    next(streams[0], None)
                    for stream in streams:
                        stream.close()
                salt = dice.one_of(None, None, "another tenant")
                assert tokens(llm.generate(prompts, params, cache_salt=salt)) == expected
                known += whole
                if dice.one_of(True, False, False):
                    llm.reset_prefix_cache()
            check_rest(llm)
