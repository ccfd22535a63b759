"""kvconnect behind SGLang's hierarchical cache, over stand-ins for its host pools."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch
from sglang_pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    StandInPool,
    damage,
    fill,
    hashes,
    indices,
    page_content,
    round_trip,
    storage_config,
)

from kvconnect.backends.disk.store import DiskBackend
from kvconnect.errors import ConfigurationError, UnsupportedModel
from kvconnect.integrations.sglang import KvConnectStorage


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/kv?capacity=64MiB"


@pytest.fixture
def opened(tiny, url):
    """A storage over a filled pool."""

    def make(pool=None, **more):
        pool = pool or StandInPool("page_first")
        fill(pool)
        storage = KvConnectStorage(storage_config(tiny, url, is_mla=pool.is_mla, **more), {})
        storage.register_mem_pool_host(pool)
        made.append(storage)
        return storage, pool

    made = []
    yield make
    for storage in made:
        storage.close()


def pairs():
    """Each layout as a source and as a target."""
    for is_mla, layouts in ((False, MHA_LAYOUTS), (True, MLA_LAYOUTS)):
        for number, layout in enumerate(layouts):
            yield is_mla, layout, layouts[number - 1]


@pytest.mark.parametrize(("is_mla", "source", "target"), list(pairs()))
def test_pages_come_back_byte_for_byte_in_any_layout(tiny, url, is_mla, source, target):
    def make_storage():
        return KvConnectStorage(storage_config(tiny, url, is_mla=is_mla), {})

    round_trip(
        make_storage(),
        StandInPool(source, is_mla=is_mla),
        StandInPool(target, is_mla=is_mla),
        make_storage=make_storage,
    )


@pytest.mark.planted("rank-share", "sglang", "key")
def test_ranks_have_pages_of_their_own_and_share_latents(tiny, url, opened):
    names = hashes(3)
    both = [opened(StandInPool("page_first"), tp_rank=rank, tp_size=2) for rank in range(2)]
    first, second = (storage for storage, _ in both)
    assert first.batch_set_v1(names, indices([0, 1, 2])) == [True] * 3
    assert first._access.flush(60)
    assert (first.batch_exists(names), second.batch_exists(names)) == (0, 0)  # a half is missing
    fill(both[1][1], 5)
    saved = page_content(both[1][1], 1)
    assert second.batch_set_v1(names, indices([0, 1, 2])) == [True] * 3
    assert second._access.flush(60)
    assert (first.batch_exists(names), second.batch_exists(names)) == (3, 3)
    assert second.batch_get_v1(names, indices([6, 7, 8])) == [True] * 3
    assert torch.equal(page_content(both[1][1], 7), saved)
    latent = [
        opened(StandInPool("page_first", is_mla=True), tp_rank=rank, tp_size=2)[0]
        for rank in range(2)
    ]
    assert latent[1].batch_set_v1(names, indices([0, 1, 2])) == [True] * 3
    assert latent[1]._access.flush(60)
    assert latent[1].batch_exists(names) == 0  # said, and left to the writer
    assert latent[0].batch_set_v1(names, indices([0, 1, 2])) == [True] * 3
    assert latent[0]._access.flush(60)
    assert latent[1].batch_exists(names) == 3


def test_damaged_pages_are_misses_and_saved_anew(opened, tmp_path):
    names = hashes(5)
    storage, _ = opened()
    storage.batch_set_v1(names, indices(range(5)))
    storage.close()
    damage(tmp_path / "kv", 2 * 4096 + 300)  # inside the third page
    storage, pool = opened()
    assert storage.batch_get_v1(names, indices(range(5, 10))) == [True, True, False, False, False]
    saved = page_content(pool, 0)
    assert storage.batch_set_v1(names[2:3], indices([0])) == [True]
    assert storage._access.flush(60)
    assert storage.batch_get_v1(names, indices(range(5, 10))) == [True] * 5
    assert torch.equal(page_content(pool, 7), saved)


@pytest.mark.parametrize("operation", ["lookup", "load", "save"])
def test_a_store_that_hangs_costs_its_time_limit(opened, monkeypatch, operation):
    names = hashes(3)
    limits = {"lookup_timeout_ms": 200, "load_timeout_s": 0.3, "save_timeout_s": 0.3}
    storage, _ = opened(**limits)
    storage.batch_set_v1(names, indices([0, 1, 2]))
    assert storage._access.flush(60)

    async def hang(self, *_):
        await asyncio.sleep(3600)
        return 0

    for name in (operation, f"{operation}_hashed", f"{operation}_sealed"):
        if hasattr(DiskBackend, name):
            monkeypatch.setattr(DiskBackend, name, hang)
    started = time.monotonic()
    if operation == "lookup":
        assert storage.batch_exists(names) == 0
    elif operation == "load":
        assert storage.batch_get_v1(names, indices([3, 4, 5])) == [False] * 3
    else:
        storage.batch_set_v1(hashes(3, "c"), indices([0, 1, 2]))
    storage.close()
    assert time.monotonic() - started < 60


def test_staging_that_is_full_is_waited_for(opened):
    names = hashes(12)
    storage, _ = opened(staging_bytes=8192)  # two pages
    assert storage.batch_set_v1(names, indices(range(12))) == [True] * 12
    assert storage._access.flush(60)
    assert storage.batch_exists(names) == 12


def test_after_close_nothing_is_found(opened):
    storage, _ = opened()
    storage.close()
    storage.close()
    names = hashes(1)
    assert storage.batch_exists(names) == 0
    assert storage.batch_get_v1(names, indices([0])) == [False]
    assert storage.batch_set_v1(names, indices([0])) == [False]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"url": ""}, "extra-config.url: is missing"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"urll": "memory:"}, "did you mean 'url'"),
        ({"namespace": "shared"}, "namespace"),
        ({"lookup_timeout_ms": -1}, "lookup_timeout_ms"),
        ({"save_on": "finish"}, "unknown field 'save_on'"),
        ({"min_load_tokens": 64}, "unknown field 'min_load_tokens'"),
        ({"producer_timeout_s": 1}, "unknown field 'producer_timeout_s'"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(tiny, more, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        KvConnectStorage(storage_config(tiny, more.pop("url", "memory:"), **more), {})


@pytest.mark.planted("blocks-passed-by-window", "sglang", "refused")
def test_pools_of_another_form_are_refused(tiny, url, tmp_path):
    def refused(pool, complaint, error=UnsupportedModel):
        storage = KvConnectStorage(storage_config(tiny, url, is_mla=pool.is_mla), {})
        with pytest.raises(error, match=complaint):
            storage.register_mem_pool_host(pool)

    unified = StandInPool("page_first")
    unified.layout = "page_unified"
    refused(unified, "page_unified")
    drafts = StandInPool("page_first")
    drafts.target_layer_num = LAYERS_WITHOUT_DRAFT
    refused(drafts, "draft model")
    more = StandInPool("page_first")
    more.get_page_buffer_meta = lambda at: ([*StandInPool.get_page_buffer_meta(more, at)[0]], [8])
    with pytest.raises((UnsupportedModel, ValueError)):
        KvConnectStorage(storage_config(tiny, url), {}).register_mem_pool_host(more)
    scales = StandInPool("page_first")
    meta = scales.get_page_buffer_meta
    scales.get_page_buffer_meta = lambda at: ([*meta(at)[0], 64], [*meta(at)[1], 8])
    refused(scales, "cannot be served")
    odd = StandInPool("page_first")
    odd.page_size, odd.page_num = 1, odd.size
    refused(odd, "tokens_per_block: 1", ConfigurationError)
    lying = StandInPool("page_first")
    lying.head_dim = 4
    refused(lying, "cannot be served", ConfigurationError)
    config = storage_config(tiny, url)
    config.attn_cp_size = 2
    with pytest.raises(UnsupportedModel, match="context parallelism"):
        KvConnectStorage(config, {})
    with pytest.raises(ConfigurationError, match="model"):
        KvConnectStorage(storage_config(tmp_path / "none", url), {})
    for name in ("swa", "indexer", "draft"):
        with pytest.raises(UnsupportedModel, match=name):
            KvConnectStorage(storage_config(tiny, url), {}).register_mem_host_pool_v2(None, name)


LAYERS_WITHOUT_DRAFT = 2
