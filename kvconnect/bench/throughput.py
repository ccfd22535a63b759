"""``kvconnect bench engine``: how much faster many requests at once are than one."""

from __future__ import annotations

import time
from pathlib import Path

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.bench.report import Figure
from kvconnect.bench.workload import random_prompt

__all__ = ["throughput"]


def throughput(
    model: Path, *, requests: int, prompt_tokens: int, max_tokens: int, repeats: int
) -> list[Figure]:
    """Generated tokens per second of one request and of `requests` at once, without reuse.

    The best of `repeats` alternating runs of each counts. Blocks for minutes.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    cache = KvCacheConfig(
        enable_block_reuse=False, max_tokens=(requests + 1) * (prompt_tokens + max_tokens + 64)
    )
    with LLM(model, kv_cache=cache) as llm:

        def run(count: int) -> float:
            prompts = [random_prompt(prompt_tokens, seed=seed) for seed in range(count)]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
            return sum(len(output.output_token_ids) for output in outputs) / seconds

        run(1)
        pairs = [(run(1), run(requests)) for _ in range(repeats)]
    one = max(pair[0] for pair in pairs)
    many = max(pair[1] for pair in pairs)
    return [
        Figure("one request", one, "tokens/s"),
        Figure(f"{requests} requests at once", many, "tokens/s"),
        Figure("ratio", many / one, "x", ">= 3" if requests == 16 else ""),
    ]
