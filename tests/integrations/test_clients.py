"""Other projects' connectors for TensorRT-LLM, their own files out of their wheels, unchanged.

Their engines, which need a GPU, a server or native libraries, are replaced by stand-ins.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import kvbm_stand_in
import lmcache_stand_in
import pytest
import torch
from stand_ins import StandInStore

from kvconnect.connector.stream import CpuStream

pytestmark = pytest.mark.clients

T = 16
PROMPTS = [
    "Clients of another engine run here, unmodified. " * 3,
    "Clients of another engine run here, unmodified. " * 2 + "And then? ",
]


def wheel(project: str, version: str, cache: Path) -> Path:
    """The wheel of `project`, from `cache` or the index; without one the test is skipped."""
    if found := sorted(cache.glob(f"{project}-{version}-*.whl")):
        return found[0]
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q"),
                *("--no-deps", "--only-binary=:all:", "--timeout=20", "--retries=1"),
                *("--dest", scratch, f"{project}=={version}"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        made = sorted(Path(scratch).glob("*.whl"))
        if done.returncode or not made:
            why = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            pytest.skip(f"{project}=={version} cannot be downloaded: {why}")
        return made[0].rename(cache / made[0].name)


def unpacked(wheel: Path, folders: tuple[str, ...], into: Path) -> Path:
    """The Python files of `folders` (or of that name) in `wheel`, unchanged, below `into`."""
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name
            for name in archive.namelist()
            if name.endswith(".py") and any(name.startswith(folder) for folder in folders)
        ]
        assert names, f"{wheel.name} has nothing in {folders}"
        archive.extractall(into, names)
    return into


@pytest.fixture(scope="session")
def wheels(request):
    return request.config.cache.mkdir("wheels")


@pytest.fixture
def store():
    return StandInStore(T)


@pytest.fixture
def lmcache(installed, wheels, tmp_path, monkeypatch, store):
    found = wheel("lmcache", "0.5.6", wheels)
    unpacked(found, ("lmcache/integration/__init__", "lmcache/integration/tensorrt_llm"), tmp_path)
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    return lmcache_stand_in.stand_in(str(tmp_path / "lmcache"), store)


@pytest.fixture
def kvbm(installed, wheels, tmp_path, monkeypatch, store):
    found = wheel("kvbm", "1.6.1", wheels)
    unpacked(found, ("kvbm/utils", "kvbm/trtllm_integration"), tmp_path)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "Event", kvbm_stand_in.Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: CpuStream())
    monkeypatch.setenv("DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR", "false")
    return kvbm_stand_in.stand_in(str(tmp_path / "kvbm"), store)


def answers(model, connector: dict[str, str] | None, prompts: list[str] = PROMPTS):
    """Of a new engine: token ids of each answer, and how many prompt tokens the client brought."""
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import KvCacheConfig
    from tensorrt_llm.llmapi.llm_args import KvCacheConnectorConfig

    llm = LLM(
        model=str(model),
        backend="pytorch",
        cuda_graph_config=None,
        dtype="float64",
        kv_cache_config=KvCacheConfig(tokens_per_block=T, max_tokens=2048),
        kv_connector_config=KvCacheConnectorConfig(**connector) if connector else None,
    )
    try:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, end_id=-1))
    finally:
        llm.shutdown()
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, [output.engine_output.reused_store_tokens for output in outputs]


def keeps_prompts_over_restarts(model, store, connector: dict[str, str]) -> None:
    """Cold and restored answers are those without it; blocks that are wrong change them."""
    expected, _ = answers(model, None)
    cold, brought = answers(model, connector)
    assert cold == expected
    assert brought == [0, 0]
    restored, brought = answers(model, connector)
    assert restored == expected
    assert all(one >= 3 * T for one in brought)
    assert store.loaded
    store.spoil()
    assert answers(model, connector)[0] != expected, "nothing was read from what it loaded"


def test_lmcache_in_the_process(lmcache, tiny, store):
    keeps_prompts_over_restarts(tiny, store, {"connector": "lmcache"})
    [engine] = lmcache.builder.engines.values()
    metadata = engine.metadata
    assert metadata.model_name == str(tiny)
    assert (metadata.world_size, metadata.worker_id, metadata.local_worker_id) == (1, 0, 0)
    assert metadata.kv_dtype == torch.float64
    assert metadata.kv_shape[:3] == (2, 2, T)
    heads, dim = metadata.kv_shape[3:]
    assert store.pool.shape[1:] == (2, 2, T * heads * dim)
    from lmcache.integration.tensorrt_llm import destroy_engine

    destroy_engine()
    assert not lmcache.builder.engines


def test_lmcache_as_a_server(lmcache, tiny, store):
    connector = {"connector": "lmcache-mp", "server_url": "tcp://stand-in:5555"}
    keeps_prompts_over_restarts(tiny, store, connector)
    assert set(lmcache.client.urls) == {"tcp://stand-in:5555"}
    assert len(lmcache.client.ended) == 3 * len(PROMPTS)


def test_dynamos_kvbm(kvbm, tiny, store):
    keeps_prompts_over_restarts(tiny, store, {"connector": "kvbm"})
    assert len(kvbm.finished) == 3 * len(PROMPTS)
    assert kvbm.submitted
    assert not kvbm.orders
