"""Offsets beyond 4 GiB: in 96 GiB of address space of which only what is touched takes memory."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver
from shim_runs import driver_of

from kvconnect.kernels.append import reshape_and_cache
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.copy import copy_blocks, gather_blocks, scatter_blocks
from kvconnect.kernels.cuda import device
from kvconnect.kernels.cuda.compile.sources import CompiledPart, Kernel
from kvconnect.kernels.cuda.launch.launcher import MAX_VECTORS, TILE, Params, divisor, span
from kvconnect.kernels.update import kv_cache_update

GIB = 1 << 30
ARENA = 96 * GIB
_NORESERVE = 0x4000  # MAP_NORESERVE, which Python's mmap names from 3.13 on


def make_arena():
    try:
        memory = mmap.mmap(-1, ARENA, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError as error:
        pytest.skip(f"96 GiB of address space cannot be had: {error}")
    # With huge pages every byte that is touched would take 2 MiB.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8))


@pytest.fixture(scope="module")
def arena():
    return make_arena()


@pytest.fixture
def driven(shim, arena):
    driver, policy = driver_of(shim, 2, writes=[arena])
    with device.driven_by(driver, policy):
        yield driver


def mark(tensor, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randn(tensor.shape, generator=generator))


def layers_apart(arena):
    """Layers of a few blocks, so far apart that both block strides and offsets pass 4 GiB."""
    words = arena.view(torch.bfloat16)
    size, step = (5, 4, 1, 8), 5 * GIB // 2
    views = []
    for number in range(2):
        start = number * (40 * GIB // 2) + 8
        views.append(words[start:].as_strided(size, (step, 8, 8, 1)))
    return PagedKv.from_views(views)


def test_blocks_beyond_4_gib_are_gathered_scattered_and_copied(arena, driven):
    kv = layers_apart(arena)
    for seed, view in enumerate(kv.views):
        for block in range(5):
            mark(view[block], 10 * seed + block)
    ids = [4, 0, 2]
    out = torch.empty(3, kv.block_nbytes, dtype=torch.uint8)
    driven.allow_tensor(out, writable=True)
    gather_blocks(kv, ids, out, path="kernel")
    half = kv.block_nbytes // 2
    for row, block in enumerate(ids):
        for number, view in enumerate(kv.views):
            expected = view[block].contiguous().view(-1).view(torch.uint8)
            assert torch.equal(out[row, number * half : (number + 1) * half], expected)
    src = out.flip(0).contiguous()
    driven.allow_tensor(src, writable=False)
    scatter_blocks(src, kv, [1, 3, 4], path="kernel")
    again = torch.empty_like(out)
    driven.allow_tensor(again, writable=True)
    gather_blocks(kv, [1, 3, 4], again, path="kernel")
    assert torch.equal(again, src)
    copy_blocks(kv, kv, [(3, 0), (4, 2)], [3, 4], path="kernel")
    for view in kv.views:
        assert torch.equal(view[0][:3], view[3][:3])
        assert torch.equal(view[2], view[4])


def test_ids_times_strides_pass_32_bits_in_a_pool_of_small_blocks(arena, driven):
    pool = arena.view(torch.bfloat16).view(-1, 1, 2, 16, 8, 128)  # 64 KiB a block
    kv = PagedKv.from_pool(pool)
    ids = [0, 65_535, 65_536, 131_072, 1_000_003, kv.num_blocks - 1]
    for block in ids:
        mark(pool[block], block)
    out = torch.empty(len(ids), kv.block_nbytes, dtype=torch.uint8)
    driven.allow_tensor(out, writable=True)
    gather_blocks(kv, ids, out, path="kernel")
    for row, block in enumerate(ids):
        assert torch.equal(out[row], pool[block].view(-1).view(torch.uint8))


def test_tokens_go_to_slots_beyond_4_gib(arena, driven):
    kv = layers_apart(arena)
    states = torch.randn(4, 1, 8, dtype=torch.bfloat16)
    slots = torch.tensor([19, 0, 9, 17])
    for tensor in (states, slots):
        driven.allow_tensor(tensor, writable=False)
    reshape_and_cache(states, None, kv, slots, layer=1)
    for state, slot in zip(states, slots.tolist(), strict=True):
        assert torch.equal(kv.views[1][slot // 4, slot % 4], state)


@pytest.mark.parametrize("packed", [False, True])
def test_caches_of_more_than_4_gib_are_updated(arena, driven, packed):
    # Strides of batch, head and position all pass 4 GiB.
    strides = (30 * GIB, 13 * GIB, 5 * GIB, 1)
    cache = arena.as_strided((2, 2, 3, 64), strides)
    update = torch.randint(0, 256, (2, 2, 2, 64), dtype=torch.uint8)
    starts = torch.tensor([1, 0])
    driven.allow_tensor(starts, writable=False)
    if packed:
        given, lengths = update.transpose(1, 2).reshape(4, 2, 64), torch.tensor([0, 2, 4])
        driven.allow_tensor(lengths, writable=False)
        driven.allow_tensor(given, writable=False)
        kv_cache_update(cache, given, starts, lengths, update_form="packed_nhd")
    else:
        driven.allow_tensor(update, writable=False)
        kv_cache_update(cache, update, starts)
    for i, start in enumerate(starts.tolist()):
        assert torch.equal(cache[i, :, start : start + 2], update[i])


def test_the_last_row_that_a_launch_can_number_is_found(shim, arena):
    # 2^31 - 1 vectors of a byte in one launch: only its last CTAs run.
    source, target = arena[1:], arena[50 * GIB + 1 :]
    driver = FakeDriver(shim, everything=True)
    driver.allow_tensor(arena, writable=True)
    rows = [(3, MAX_VECTORS // 3), (1, MAX_VECTORS), (MAX_VECTORS // 7, 7), (MAX_VECTORS, 1)]
    for nbytes, count in rows:
        begin, end = nbytes * count - 5000, nbytes * count
        source[begin:end] = torch.randint(0, 256, (5000,), dtype=torch.uint8)
        target[begin : end + 5000] = 0
        runs = driver.constant(np.zeros((1, 3), np.int64))
        # Of the ids, 0 to count - 1, only those of the last CTAs are in memory.
        first = count - -(-5000 // nbytes)
        ids = driver.constant(np.arange(first, count, dtype=np.int64))
        all_ids = (ids.address - first * 8, 8, count)
        params = Params(
            (source.data_ptr(), nbytes, target.data_ptr(), nbytes, runs.address, 0),
            (*divisor(1), *all_ids, *all_ids, 0, 0),
        )
        ctas = -(-nbytes * count // TILE)
        kernel = Kernel(CompiledPart("copy_runs", 1), "copy_listed")
        filled = params.filled(span(0, count, nbytes))
        shim.launch(kernel, ctas, filled, driver.regions, only=range(ctas - 4, ctas))
        tail = nbytes * count - (ctas - 4) * TILE
        assert torch.equal(target[end - tail : end], source[end - tail : end])
        assert not target[end : end + 5000].any(), "nothing beyond the end"


def test_divisors_are_right_for_all_dividends_they_are_for():
    powers = [2**k + d for k in range(31) for d in (-1, 0, 1)]
    numbers = sorted({n for n in (*powers, 3, 5, 7, 10, 641, 6_700_417, MAX_VECTORS) if n >= 1})
    numbers = [number for number in numbers if number <= MAX_VECTORS]
    for by in numbers:
        packed = divisor(by)[1]
        multiplier, shift = packed & 0xFFFFFFFF, packed >> 32
        multiples = {by * (MAX_VECTORS // by), by, MAX_VECTORS // 2 // by * by}
        for value in {m + d for m in multiples for d in (-1, 0, 1)} | {0, MAX_VECTORS}:
            if 0 <= value <= MAX_VECTORS:
                assert value * multiplier >> shift == value // by, (value, by)
        assert value * multiplier < 2**64
