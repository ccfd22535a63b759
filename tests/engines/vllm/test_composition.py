"""Beside other connectors, over several processes, with several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from vllm_engine import connector, engine, prompts_of

# Engines one after the other, some in several processes: minutes on a busy machine.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

PROMPTS = prompts_of(500, 320, 33)
LOADED = [480, 320, 32]  # what of them a load in the background brings: all whole blocks
HERE = Path(__file__).parent


def test_as_a_child_of_multi_connector(llama, store, tmp_path):
    """Beside a connector of vLLM's own, and with a second store: the first that has it loads."""
    second = connector(f"disk://{tmp_path}/second?capacity=64MiB")
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [connector(store), second]},
    }
    with engine(llama, transfer) as made:
        cold = made.answer(PROMPTS)
        for child in made.worker._connectors:
            assert child._worker._worker._queue.flush(30)
        made.forget_device()
        loaded = made.answer(PROMPTS)
        made.settle()
        for child in made.connector._connectors:
            assert child.num_tracked == 0
    assert [one.tokens for one in loaded] == [one.tokens for one in cold]
    assert [one.cached for one in loaded] == LOADED
    with engine(llama, second) as other:  # both have it
        assert [one.cached for one in other.answer(PROMPTS)] == LOADED


def run(model: Path, transfer: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What an engine in a process of its own answers to `PROMPTS`, or to those in `more`."""
    job = {"model": str(model), "transfer": transfer, "prompts": PROMPTS} | more
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if more.get("core_process") else "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or two ranks want two NUMA nodes
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_child.py")],
        input=json.dumps(job),
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_core_in_a_process_of_its_own(llama, store):
    """The default of ``vllm serve``."""
    cold = run(llama, connector(store), core_process=True)
    again = run(llama, connector(store), core_process=True)
    assert again["tokens"] == cold["tokens"]
    assert (cold["cached"], again["cached"]) == ([0, 0, 0], LOADED)


def test_prefill_and_decode_in_two_processes(llama, store):
    prefill = run(llama, connector(store, KV_ROLE="kv_producer"), num_tokens=1)
    assert prefill["params"] == [{"kvconnect_num_tokens": n} for n in (480, 320, 32)]
    decode = run(
        llama, connector(store, KV_ROLE="kv_consumer"), params=prefill["params"], num_tokens=8
    )
    with engine(llama, None) as plain:
        assert decode["tokens"] == plain.tokens(PROMPTS)
    assert decode["cached"] == LOADED


def test_two_ranks_and_one_read_each_others_blocks(llama, store):
    one = run(llama, connector(store))
    two = run(llama, connector(store), tensor_parallel_size=2)
    assert two["cached"] == LOADED
    assert two["tokens"] == one["tokens"]
    own = connector(store.replace("/store", "/other"))
    run(llama, own, tensor_parallel_size=2)
    scraped = connector(store.replace("/store", "/other"), metrics_port=24_680)
    again = run(llama, scraped, tensor_parallel_size=2)
    assert again["cached"] == LOADED
    blocks = sum(LOADED) // 32
    # The core and the two ranks, in the order in which they came to listen.
    assert sorted(again["loaded"][:3]) == [0, blocks, blocks]
    assert again["loaded"][3] is None
    assert run(llama, own)["cached"] == LOADED


def test_memory_of_one_process_is_refused_by_several(llama):
    transfer = connector("memory:")
    with pytest.raises(AssertionError, match="lives in one process"):
        run(llama, transfer, tensor_parallel_size=2)
