"""Every reused token has the keys and values that were computed for its path, in every layer."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from small_prompts import request_of

from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.config import KvCacheConfig
from kvconnect.errors import OutOfBlocks
from kvconnect.layout import KvCacheLayout
from kvconnect.request import RequestState, ScheduledBatch

T = 4
LAYOUTS = [
    KvCacheLayout(3, 2, 5, 5, T, torch.float32),
    KvCacheLayout(3, 2, 5, 5, T, torch.bfloat16),
    KvCacheLayout(2, 2, 5, 3, T, torch.float64),
    KvCacheLayout(2, 1, 6, 0, T, torch.float32),
]


# What is copied is a matter of the layout, what is taken over one of the tree alone.
BY_LAYOUT = [
    *((layout, True) for layout in LAYOUTS),
    (LAYOUTS[0], False),
    *(pytest.param(layout, False, marks=pytest.mark.slow) for layout in LAYOUTS[1:]),
]


@cache
def computed(path, layer, is_value, shape):
    """What a model computes for the last token of `path`, as bytes; it depends on all of them."""
    seed = hashlib.blake2b(path + bytes([layer, is_value]), digest_size=8).digest()
    numbers = np.random.default_rng(int.from_bytes(seed)).integers(1, 200, shape)
    return torch.from_numpy(numbers)


class FakeModel:
    """Writes a function of the token's path and the layer into its slot, and reads it back."""

    def __init__(self, manager):
        self.manager = manager

    def slots(self, request, layer):
        """Finds the key and value of the token at a position, as views."""
        tables = self.manager.get_group_cache_indices([request], self.group_of(layer))
        blocks = tables[request.request_id]
        buffers = self.manager.get_buffers(layer)
        keys, values = (buffers[:, 0], buffers[:, 1]) if torch.is_tensor(buffers) else buffers

        def at(position):
            block = blocks[position // T]
            assert block >= 0, f"token {position} of {request} has no block for layer {layer}"
            return keys[block, position % T], values[block, position % T]

        return at

    def group_of(self, layer):
        layouts = self.manager.layouts
        return next(g for g, layout in enumerate(layouts) if layer in layout.layer_numbers)

    def layers(self):
        return [n for layout in self.manager.layouts for n in layout.layer_numbers]

    def first(self, layer, position):
        """The first token that the one at `position` attends to."""
        window = self.manager.layouts[self.group_of(layer)].window
        return 0 if window is None else max(0, position - window + 1)

    @staticmethod
    def expected(request, position, layer, slot):
        path = request.tokens.view[: position + 1].tobytes()
        return [computed(path, layer, n, view.shape).to(view.dtype) for n, view in enumerate(slot)]

    def run(self, request, start, stop):
        for layer in self.layers():
            at = self.slots(request, layer)
            for position in range(start, stop):
                slot = at(position)
                for view, value in zip(
                    slot, self.expected(request, position, layer, slot), strict=True
                ):
                    view.copy_(value)

    def check(self, request, stop):
        for layer in self.layers():
            at = self.slots(request, layer)
            for position in range(self.first(layer, stop), stop):
                slot = at(position)
                for view, value in zip(
                    slot, self.expected(request, position, layer, slot), strict=True
                ):
                    assert torch.equal(view, value), f"token {position} of {request}, layer {layer}"


def run_request(manager, model, request, random, chunk):
    """From admission to the end; returns how many tokens were reused."""
    batch = ScheduledBatch(context_requests=[request])
    manager.prepare_resources(batch)
    if batch.refused_requests:
        return 0
    reused = request.num_computed_tokens
    model.check(request, reused)
    while request.num_computed_tokens < request.num_tokens:  # in chunks
        start = request.num_computed_tokens
        stop = min(start + int(random.integers(1, (chunk or 8) + 1)), request.num_tokens)
        try:
            manager.prepare_resources(batch)
        except OutOfBlocks:
            manager.free_resources(request)
            return reused
        model.run(request, start, stop)
        request.num_computed_tokens = stop
        manager.update_resources(batch)
    request.state = RequestState.GENERATION
    for _ in range(int(random.integers(0, 4))):
        request.append_tokens(random.integers(0, 2, 1).astype(np.int32))
        batch = ScheduledBatch(generation_requests=[request])
        try:
            manager.prepare_resources(batch)
        except OutOfBlocks:
            break
        model.run(request, request.num_computed_tokens, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        manager.update_resources(batch)
    model.check(request, request.num_computed_tokens)
    return reused


def run_requests(manager, count, chunk=None, longest=18):
    """Many requests, some of them at once; returns tokens reused, and those by part of a block."""
    model, random = FakeModel(manager), np.random.default_rng(3)
    if chunk is not None:
        manager.expect_chunks(chunk)
    live, reused, partial = [], 0, 0
    for number in range(count):
        prompt = random.integers(0, 2, random.integers(1, longest))
        request = request_of(number, prompt, T, max_tokens=8)
        found = run_request(manager, model, request, random, chunk)
        reused, partial = reused + found, partial + found % T
        if request.state is RequestState.GENERATION:
            live.append(request)
        while len(live) > (0 if number == count - 1 else int(random.integers(0, 3))):
            ended = live.pop(int(random.integers(len(live))))
            # Those that share blocks with it, or copied from them, have not touched what it has.
            model.check(ended, ended.num_computed_tokens)
            manager.free_resources(ended)
        manager.blocks.check_invariants()
    return reused, partial


class Counting:
    """Counts the orders that a copier carries out."""

    def __init__(self, copier):
        self.counts = Counter()
        for name in ("onboard", "offload", "copy_tokens", "move"):
            setattr(copier, name, self.counted(name, getattr(copier, name)))

    def counted(self, name, order):
        def count(*arguments, **options):
            self.counts[name] += 1
            return order(*arguments, **options)

        return count


@pytest.mark.parametrize(("layout", "copy"), BY_LAYOUT, ids=str)
def test_reused_tokens_are_those_that_were_computed_also_after_a_stay_on_the_host(layout, copy):
    config = KvCacheConfig(
        tokens_per_block=T, copy_on_partial_reuse=copy, host_cache_size=30 * layout.block_nbytes
    )
    manager = KVCacheManager(config, [layout], num_blocks=9)
    orders = Counting(manager._copier)
    reused, partial = run_requests(manager, 60)
    assert reused > 60
    assert partial > 10
    assert orders.counts["onboard"] > 10
    assert orders.counts["offload"] > 10


POOLS = [
    KvCacheLayout(1, 1, 6, 6, T, torch.float32, layers=(1,)),
    KvCacheLayout(2, 1, 6, 6, T, torch.float32, 7, layers=(0, 3)),
    KvCacheLayout(1, 2, 6, 6, T, torch.float32, 3, layers=(2,)),
]


@pytest.mark.parametrize(("chunk", "host"), [(None, 0), (8, 40)])
@pytest.mark.parametrize("layouts", [POOLS, POOLS[1:]], ids=["three", "windows"])
def test_in_pools_of_several_windows(layouts, host, chunk):
    block = sum(layout.block_nbytes for layout in layouts)
    config = KvCacheConfig(tokens_per_block=T, host_cache_size=host * block)
    manager = KVCacheManager(config, layouts, num_blocks=12)
    orders = Counting(manager._copier)
    reused, _ = run_requests(manager, 50, chunk)
    assert reused > 60
    assert bool(orders.counts["onboard"]) == bool(host)


@pytest.mark.parametrize("host", [0, 20], ids=["device", "host"])
def test_where_pools_give_each_other_memory(host):
    block = sum(layout.block_nbytes for layout in POOLS)
    config = KvCacheConfig(tokens_per_block=T, max_tokens=56, host_cache_size=host * block)
    manager = KVCacheManager(config, POOLS)
    orders = Counting(manager._copier)
    sizes = set()
    for round_of in range(3):
        # Long prompts need full attention, many short ones the windows.
        run_requests(manager, 25, 4, longest=60 if round_of == 1 else 12)
        sizes.add(tuple(manager.blocks.max_blocks(window=window) for window in (None, 7, 3)))
    assert len(sizes) > 1
    assert orders.counts["move"] > 0
