"""The memory of pools, host tiers and arenas."""

from __future__ import annotations

import gc

import pytest
import torch

from kvconnect.cache.memory.pool_tensor import (
    allocate_arena,
    allocate_host_pool,
    allocate_pool,
    layer_buffers,
    pool_view,
)
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
LAYOUT = KvCacheLayout(3, 2, 5, 5, 4, torch.bfloat16)
LAYOUTS = [
    LAYOUT,
    KvCacheLayout(3, 2, 5, 5, 4, torch.float8_e4m3fn),
    KvCacheLayout(2, 2, 5, 3, 4, torch.float32),
    KvCacheLayout(2, 1, 6, 0, 4, torch.float64),
]


@pytest.mark.parametrize("allocate", [allocate_pool, allocate_host_pool])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pools_are_zeroed_and_begin_on_a_page(allocate, layout):
    pool = allocate(layout, 7, CPU)
    assert pool.shape == layout.flat_shape(7)
    assert pool.dtype == layout.dtype
    assert pool.data_ptr() % 4096 == 0
    assert not pool.view(torch.uint8).any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_block_i_of_a_view_is_the_ith_run_of_bytes(layout):
    arena = allocate_arena(6 * layout.block_nbytes, CPU)
    pool = pool_view(arena, layout)
    pool[2].view(torch.uint8).fill_(7)
    nbytes = layout.block_nbytes
    assert arena[2 * nbytes : 3 * nbytes].eq(7).all()
    assert arena.eq(7).sum() == nbytes


def test_layers_of_two_views_of_an_arena_are_the_same_bytes():
    full = KvCacheLayout(2, 2, 4, 4, 4, torch.bfloat16)
    window = KvCacheLayout(3, 2, 4, 4, 4, torch.bfloat16, 16)
    arena = allocate_arena(6 * full.block_nbytes, CPU)
    pools = pool_view(arena, full), pool_view(arena, window)
    assert [len(pool) for pool in pools] == [6, 4]
    layer_buffers(pools[0], full, 1)[4] = 3  # the tenth layer's worth of the arena, from 0
    assert layer_buffers(pools[1], window, 0)[3].eq(3).all()
    assert layer_buffers(pools[1], window, 0)[:3].eq(0).all()


def test_an_arena_of_no_whole_number_of_blocks_is_refused():
    arena = allocate_arena(LAYOUT.block_nbytes + 2, CPU)
    with pytest.raises(ConfigurationError, match=str(LAYOUT.block_nbytes)):
        pool_view(arena, LAYOUT)


class FakeRuntime:
    """Of CUDA: what is page-locked now."""

    def __init__(self, code=0):
        self.code = code
        self.locked = {}

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        if not self.code:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]
        return 0


def test_the_host_tier_of_a_gpu_is_page_locked_until_it_is_not_used(monkeypatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = allocate_host_pool(LAYOUT, 5, CUDA)
    assert runtime.locked == {pool.data_ptr(): 5 * LAYOUT.block_nbytes}
    block = pool[3]
    del pool
    gc.collect()
    assert runtime.locked
    del block
    gc.collect()
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_a_matter_of_configuration(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(code=2))
    with pytest.raises(ConfigurationError, match="host_cache_size"):
        allocate_host_pool(LAYOUT, 5, CUDA)


def test_a_host_tier_beyond_all_memory_is_a_matter_of_configuration():
    with pytest.raises(ConfigurationError, match="host_cache_size"):
        allocate_host_pool(LAYOUT, 1 << 54, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_sees_the_host_tier_as_page_locked():
    assert allocate_host_pool(LAYOUT, 5, CUDA).is_pinned()
