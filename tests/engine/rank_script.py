"""An engine of several ranks as a program of its own, without a guard for its main module.

Arguments: the model's directory, ranks, and what to do: ``answer`` prints tokens and closes the
engine, ``serve`` prints the followers' process ids and generates until it is killed, ``forget``
ends without closing the engine.
"""

import json
import sys

from kvconnect import LLM, KvCacheConfig, SamplingParams

directory, ranks, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
llm = LLM(
    directory,
    tensor_parallel_size=ranks,
    dtype="float64",
    device="cpu",
    kv_cache=KvCacheConfig(tokens_per_block=16, max_tokens=1024),
)
if what == "serve":
    print(json.dumps(llm.process_ids[1:]), flush=True)
    while True:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
(output,) = llm.generate(list(range(40)), SamplingParams(max_tokens=8))
print(json.dumps(list(output.output_token_ids)), flush=True)
if what == "answer":
    llm.close()
