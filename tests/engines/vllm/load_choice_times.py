"""Measures the first token of a vLLM that decides whether to load, against both alone.

The interpreter has vLLM: ``.venv-engines/vllm/bin/python tests/engines/vllm/load_choice_times.py``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

from slow_store import BUCKETS, Bucket
from vllm_engine import SIZE, Engine, connector, engine, prompts_of

from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.pace import LoadPace

SPEEDS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 16)
TARGET = 1.1


def first_token_s(made: Engine, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    made.tokens([prompt], 1)
    return time.perf_counter() - began


def measure(
    made: Engine, store: Bucket, stored: Sequence[Sequence[int]], seed: int
) -> tuple[float, float, float]:
    """Returns the seconds to the first token: computed, loaded, and as decided."""
    choice = made.connector._scheduler._choice
    choice._loads = LoadPace()
    fresh = prompts_of(*map(len, stored), seed=seed)
    took: list[list[float]] = [[], [], []]
    for number, (prompt, other) in enumerate(zip(stored, fresh, strict=True)):
        turns = [(0, other, False), (1, prompt, False), (2, prompt, True)]
        for way, tokens, decides in (*turns[number % 3 :], *turns[: number % 3]):
            choice._decides = decides
            took[way].append(first_token_s(made, tokens))
            made.forget_device()
        made.flush()
    computed, loaded, decided = map(median, took)
    return computed, loaded, decided


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=9)
    given = parser.parse_args()
    stored = prompts_of(*[given.tokens] * given.prompts)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", "llama", **SIZE)
        settings = {"load_decisions": True, "load_timeout_s": 600.0}
        transfer = connector("bucket://slow", **settings)
        with engine(model, transfer, max_model_len=8192) as made:
            store = BUCKETS["slow"]
            computed = [first_token_s(made, prompt) for prompt in stored]
            made.flush()
            made.forget_device()
            rate = store.saved / given.prompts / median(computed)
            print("store/model  computed ms  loaded ms  decided ms  decided / better")
            for number, speed in enumerate(SPEEDS):
                store.bytes_per_s = speed * rate
                one = measure(made, store, stored, seed=10 + number)
                ratio = one[2] / min(one[:2])
                figures = "".join(f"{1e3 * seconds:12.1f}" for seconds in one)
                print(f"{speed:11.3f}{figures}{ratio:12.2f}  target <= {TARGET}", flush=True)


if __name__ == "__main__":
    main()
