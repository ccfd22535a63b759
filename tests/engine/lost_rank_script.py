"""Engines that lose a rank, in a program of its own that keeps them and runs no collector.

Prints the descriptors that are open before the first, and after each has failed.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import threading

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.errors import RankLost
from kvconnect.testing.processes.usage import descriptors


def failed(directory: str) -> tuple[LLM, int]:
    """An engine that has failed, and the descriptors that are open then."""
    llm = LLM(
        directory, tensor_parallel_size=2, device="cpu", kv_cache=KvCacheConfig(max_tokens=320)
    )
    handle = llm.submit([1, 2, 3], SamplingParams(max_tokens=230, ignore_eos=True))
    next(handle.stream())
    os.kill(llm.process_ids[1], signal.SIGKILL)
    with contextlib.suppress(RankLost):
        handle.result(60)
    llm._thread._thread.join(60)
    return llm, descriptors()


if __name__ == "__main__":
    gc.disable()
    runs = [failed(sys.argv[1]) for _ in range(3)]
    # A thread that holds tqdm's lock when the interpreter ends keeps it waiting for ever.
    assert "tqdm_monitor" not in [thread.name for thread in threading.enumerate()]
    print(json.dumps([used for _, used in runs]))
