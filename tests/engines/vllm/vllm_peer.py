"""A prefill engine that stays while others read from it: a job comes by stdin, in one line.

Prompts go through it, its results to stdout, in one line; it ends when stdin does.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import vllm
from vllm_child import llm_of


def main() -> None:
    """Answer the prompts of the job, and wait."""
    job = json.loads(sys.stdin.readline())
    llm = llm_of(job)
    sampling = vllm.SamplingParams(
        max_tokens=1,
        temperature=0,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params} if (params := job.get("params")) else None,
    )
    prompts: list[Any] = [{"prompt_token_ids": one} for one in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print(json.dumps([one.kv_transfer_params for one in outputs]), flush=True)
    sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
