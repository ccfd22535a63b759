"""An engine in a process of its own: a job comes by stdin, what it answered goes to stdout.

Each in one line. An engine that ``stays`` does until stdin ends, so that others can read from it.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from typing import Any

import vllm


def loaded_blocks(port: int) -> int | None:
    """What the process of the engine that answers at `port` loaded; ``None``: there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    except urllib.error.URLError:
        return None
    told = re.findall(r'kvconnect_store_blocks_total{engine="vllm",.*"load".*} (.+)', text)
    return int(sum(map(float, told)))


def main() -> None:
    """Answer the prompts of the job, and end as a user's script does."""
    job = json.loads(sys.stdin.readline())
    llm = vllm.LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=32,
        tensor_parallel_size=job.get("tensor_parallel_size", 1),
        kv_transfer_config=job["transfer"],
    )
    given = job.get("params") or [None] * len(job["prompts"])
    sampling = [
        vllm.SamplingParams(
            max_tokens=job.get("num_tokens", 8),
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args=None if one is None else {"kv_transfer_params": one},
        )
        for one in given
    ]
    prompts: list[Any] = [{"prompt_token_ids": one} for one in job["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    answer = {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "cached": [one.num_cached_tokens or 0 for one in outputs],
        "params": [one.kv_transfer_params for one in outputs],
    }
    if port := job["transfer"]["kv_connector_extra_config"].get("metrics_port"):
        answer["loaded"] = [loaded_blocks(one) for one in range(port, port + 4)]
    if job.get("stays"):
        print(json.dumps(answer), flush=True)
        sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
