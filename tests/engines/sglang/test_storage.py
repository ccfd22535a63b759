"""`KvConnectStorage` on SGLang's own host pools, and behind its own factory and fault injector."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")

from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations"))

from sglang_pools import (
    DIM,
    HEADS,
    LATENT,
    LAYERS,
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE,
    PAGES,
    fill,
    hashes,
    indices,
    page_content,
    round_trip,
    storage_config,
)

from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.integrations.sglang import KvConnectStorage

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sglang") / "model", "llama", num_layers=2)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/kv?capacity=64MiB"


def host_pool(layout: str, *, is_mla: bool = False):
    """SGLang's own, in plain host memory."""
    tokens = PAGE * (PAGES - 1)  # one page more is added
    sizes = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": tokens,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    if is_mla:
        buffers = tuple(torch.zeros(tokens, 1, LATENT) for _ in range(LAYERS))
        info = MLABufferInfo(
            buffers=buffers,
            data_ptrs=torch.tensor([one.data_ptr() for one in buffers]),
            layer_indices=tuple(range(LAYERS)),
            device_layer_num=LAYERS,
            page_size=PAGE,
            kv_lora_rank=LATENT - 8,
            qk_rope_head_dim=8,
            kv_cache_dim=LATENT,
            dtype=torch.float32,
            device=CPU,
        )
        pool = MLATokenToKVPoolHost(info, target_layer_num=LAYERS, **sizes)
    else:
        keys, values = (
            tuple(torch.zeros(tokens, HEADS, DIM) for _ in range(LAYERS)) for _ in range(2)
        )
        info = MHABufferInfo(
            buffers=KVBuffers(
                k=keys,
                v=values,
                k_data_ptrs=torch.tensor([one.data_ptr() for one in keys]),
                v_data_ptrs=torch.tensor([one.data_ptr() for one in values]),
                layout=KVBufferLayout.NHD,
            ),
            page_size=PAGE,
            head_num=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            dtype=torch.float32,
            device=CPU,
        )
        pool = MHATokenToKVPoolHost(info, **sizes)
    pool.is_mla = is_mla
    assert pool.page_num == PAGES
    return pool


def created(model: Path, url: str, pool, **more):
    """As SGLang's cache controller makes it."""
    config = storage_config(model, url, is_mla=pool.is_mla, make=HiCacheStorageConfig, **more)
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    return storage


@pytest.mark.parametrize(
    ("is_mla", "source", "target"),
    [
        (is_mla, layout, layouts[number - 1])
        for is_mla, layouts in ((False, MHA_LAYOUTS), (True, MLA_LAYOUTS))
        for number, layout in enumerate(layouts)
    ],
)
def test_pages_come_back_byte_for_byte_in_any_layout(model, url, is_mla, source, target):
    def make_storage():
        config = storage_config(model, url, is_mla=is_mla, make=HiCacheStorageConfig)
        return KvConnectStorage(config, {})

    assert issubclass(KvConnectStorage, HiCacheStorage)
    round_trip(
        make_storage(),
        host_pool(source, is_mla=is_mla),
        host_pool(target, is_mla=is_mla),
        make_storage=make_storage,
    )


def test_behind_sglangs_own_fault_injector_no_page_is_wrong(model, url, monkeypatch):
    from sglang.srt.environ import envs

    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    assert envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.get() == 0.4
    pool = host_pool("page_first")
    fill(pool)
    storage = created(model, url, pool)
    assert type(storage).__name__ != "KvConnectStorage"  # wrapped
    names, content = hashes(5), [page_content(pool, page) for page in range(5)]
    outcomes = set()
    for _ in range(40):
        storage.batch_set_v1(names, indices(range(5)))
        found = storage.batch_exists(names)
        pool.kv_buffer[:, 5 * PAGE : 10 * PAGE] = -1
        got = storage.batch_get_v1(names[:found], indices(range(5, 5 + found))) if found else []
        outcomes.add((found, sum(got)))
        for page, there in enumerate(got):
            if there:
                assert torch.equal(page_content(pool, 5 + page), content[page])
    assert {(0, 0), (5, 5)} <= outcomes
    storage.close()


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_damaged_pages_are_misses(model, url, tmp_path, layout):
    pool = host_pool(layout)
    fill(pool)
    names = hashes(4)
    storage = created(model, url, pool)
    assert storage.batch_set_v1(names, indices(range(4))) == [True] * 4
    storage.close()
    for file in (tmp_path / "kv").rglob("*"):
        if file.is_file() and file.stat().st_size >= 1 << 20:
            with file.open("r+b") as segment:
                segment.seek(4096 + 300)
                segment.write(b"\xff" * 64)
    storage = created(model, url, pool)
    assert storage.batch_get_v1(names, indices(range(4, 8))) == [True, False, False, False]
    assert storage.batch_exists(names) == 1
    storage.close()


def test_a_store_that_is_gone_or_slow_costs_time(model, tmp_path):
    pool = host_pool("layer_first")
    fill(pool)
    limits = {"lookup_timeout_ms": 200, "load_timeout_s": 0.3, "save_timeout_s": 0.3}
    storage = created(model, f"disk://{tmp_path}/kv?capacity=64MiB", pool, **limits)
    names = hashes(3)
    assert storage.batch_set_v1(names, indices(range(3))) == [True] * 3
    assert storage._access.flush(5)
    inner = storage._access._route.store.backend.inner

    async def refuse(*_):
        raise ConnectionResetError("gone")

    for name in ("lookup", "load", "load_hashed", "save", "save_sealed"):
        setattr(inner, name, refuse)
    for _ in range(8):
        assert storage.batch_exists(names) == 0
        assert storage.batch_get_v1(names, indices(range(3, 6))) == [False] * 3
        storage.batch_set_v1(names, indices(range(3)))
    storage.close()
