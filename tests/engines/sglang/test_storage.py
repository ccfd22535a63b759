"""`KvConnectStorage` on SGLang's own host pools, and behind its own factory and fault injector."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")

from prometheus_client import REGISTRY
from real_pools import host_pool
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.observability.metrics_collector import StorageMetricsCollector
from sglang_pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE,
    fill,
    hashes,
    indices,
    page_content,
    round_trip,
    storage_config,
)

from kvconnect.integrations.sglang import KvConnectStorage


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/kv?capacity=64MiB"


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
    outcomes, until = set(), time.monotonic() + 60
    for number in itertools.count():
        storage.batch_set_v1(names, indices(range(5)))
        found = storage.batch_exists(names)
        pool.kv_buffer[:, 5 * PAGE : 10 * PAGE] = -1
        got = storage.batch_get_v1(names[:found], indices(range(5, 5 + found))) if found else []
        outcomes.add((found, sum(got)))
        for page, there in enumerate(got):
            if there:
                assert torch.equal(page_content(pool, 5 + page), content[page])
        if number >= 40 and {(0, 0), (5, 5)} <= outcomes:
            break
        assert time.monotonic() < until, outcomes
    storage.close()


def test_sglang_exports_what_went_through(model, url):
    def told(name: str) -> float:
        return REGISTRY.get_sample_value(f"sglang:{name}", labels) or 0.0

    labels = {"storage_backend": "kvconnect"}
    collector = StorageMetricsCollector(labels)
    pool = host_pool("page_first", is_mla=False)
    fill(pool)
    pages = indices([0, 1, 2])
    for saves in (True, False):
        storage = created(model, url, pool)
        try:
            if saves:
                assert storage.batch_set_v1(hashes(3), pages) == [True] * 3
            else:
                found = storage.batch_get_v1(hashes(4), torch.cat([pages, indices([3])]))
                assert found == [True, True, True, False]
                assert storage.batch_get_v1(hashes(1, seed="b"), indices([3])) == [False]
            collector.log_storage_metrics(storage.get_stats())
            collector.log_storage_metrics(storage.get_stats())  # nothing twice
        finally:
            storage.close()
    assert (told("backup_pgs_sum"), told("backup_pgs_count")) == (3, 1)
    assert (told("prefetch_pgs_sum"), told("prefetch_pgs_count")) == (3, 1)
    assert told("prefetch_bandwidth_count") == 1
    assert 0 < told("prefetch_bandwidth_sum") < 1000
