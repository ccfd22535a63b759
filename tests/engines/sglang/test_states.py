"""Recurrent states in SGLang's own host pool, through its own controller and its threads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")

from real_pools import host_pool, state_pool
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang_pools import fill, state_round_trip, storage_config

from kvconnect.errors import UnsupportedModel
from kvconnect.integrations.sglang import KvConnectStorage


@pytest.fixture
def opened(model: Path, tmp_path: Path):
    """A storage over a pool of pages and this pool of states."""

    def make(states, seed=0, *, is_mla=False):
        pool = host_pool("page_first", is_mla=is_mla)
        fill(pool, seed)
        url = f"disk://{tmp_path}/kv?capacity=64MiB"
        config = storage_config(model, url, is_mla=is_mla, make=HiCacheStorageConfig)
        storage = KvConnectStorage(config, {})
        made.append(storage)
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, PoolName.KV)
        storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
        storage.on_host_pools_registered()
        return storage, pool

    made = []
    yield make
    for storage in made:
        storage.close()


def made_transfer(name, keys, host_indices, hit_policy):
    return PoolTransfer(
        name=PoolName(name),
        keys=keys,
        host_indices=host_indices,
        hit_policy=PoolHitPolicy(hit_policy),
    )


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        {"temporal": (2, 8, 8), "conv": ((24, 3),)},
        {"temporal": (3, 5, 7), "conv": ((5, 3), (7, 2))},
        {"temporal": (0,), "conv": ((24, 2),)},  # short convolutions have no recurrent state
    ],
)
def test_states_come_back_byte_for_byte(opened, shapes, is_mla):
    state_round_trip(
        lambda states, seed: opened(states, seed, is_mla=is_mla),
        state_pool("page_first", **shapes),
        state_pool("page_first_direct", **shapes),
        make=made_transfer,
    )


def test_side_states_are_refused(opened):
    with pytest.raises(UnsupportedModel, match="side states"):
        opened(state_pool(side=(4, 4)))
