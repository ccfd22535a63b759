"""Every reused token has the keys and values that were computed for its path, in every layer."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch

from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.config import KvCacheConfig
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, RequestState, SamplingParams, ScheduledBatch

T = 4
LAYOUTS = [
    KvCacheLayout(3, 2, 5, 5, T, torch.float32),
    KvCacheLayout(3, 2, 5, 5, T, torch.bfloat16),
    KvCacheLayout(2, 2, 5, 3, T, torch.float64),
    KvCacheLayout(2, 1, 6, 0, T, torch.float32),
]


def computed(path, layer, is_value, shape):
    """What a model computes for the last token of `path`; it depends on all of them."""
    seed = hashlib.blake2b(repr((tuple(path), layer, is_value)).encode(), digest_size=8).digest()
    numbers = np.random.default_rng(int.from_bytes(seed)).integers(1, 200, shape)
    return torch.from_numpy(numbers)


class FakeModel:
    """Writes a function of the token's path and the layer into its slot, and reads it back."""

    def __init__(self, manager):
        self.manager = manager

    def slot(self, request, position, layer):
        """The token's key and value, as views."""
        block = self.manager.get_batch_cache_indices([request])[request.request_id][position // T]
        buffers = self.manager.get_buffers(layer)
        keys, values = (buffers[:, 0], buffers[:, 1]) if torch.is_tensor(buffers) else buffers
        return keys[block, position % T], values[block, position % T]

    def expected(self, request, position, layer):
        path = request.tokens.view[: position + 1].tolist()
        views = self.slot(request, position, layer)
        return [computed(path, layer, n, view.shape).to(view.dtype) for n, view in enumerate(views)]

    def run(self, request, start, stop):
        layers = range(self.manager.layouts[0].num_layers)
        for position, layer in itertools.product(range(start, stop), layers):
            slot = self.slot(request, position, layer)
            for view, value in zip(slot, self.expected(request, position, layer), strict=True):
                view.copy_(value)

    def check(self, request, stop):
        layers = range(self.manager.layouts[0].num_layers)
        for position, layer in itertools.product(range(stop), layers):
            slot = self.slot(request, position, layer)
            for view, value in zip(slot, self.expected(request, position, layer), strict=True):
                assert torch.equal(view, value), f"token {position} of {request}, layer {layer}"


def run_request(manager, model, request, random):
    """From admission to the end; returns how many tokens were reused."""
    batch = ScheduledBatch(context_requests=[request])
    manager.prepare_resources(batch)
    if batch.refused_requests:
        return 0
    reused = request.num_computed_tokens
    model.check(request, reused)
    while request.num_computed_tokens < request.num_tokens:  # in chunks
        start = request.num_computed_tokens
        stop = min(start + int(random.integers(1, 9)), request.num_tokens)
        model.run(request, start, stop)
        request.num_computed_tokens = stop
        manager.update_resources(batch)
    request.state = RequestState.GENERATION
    for _ in range(int(random.integers(0, 4))):
        request.append_tokens(random.integers(0, 2, 1).astype(np.int32))
        batch = ScheduledBatch(generation_requests=[request])
        if manager.get_num_free_blocks() == 0:
            break
        manager.prepare_resources(batch)
        model.run(request, request.num_computed_tokens, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        manager.update_resources(batch)
    model.check(request, request.num_computed_tokens)
    return reused


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "take"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reused_tokens_are_those_that_were_computed(layout, copy):
    config = KvCacheConfig(tokens_per_block=T, copy_on_partial_reuse=copy)
    manager = KVCacheManager(config, [layout], num_blocks=14)
    model, random = FakeModel(manager), np.random.default_rng(3)
    live, reused, partial = [], 0, 0
    for number in range(90):
        request = LlmRequest(
            number,
            random.integers(0, 2, random.integers(1, 18)).astype(np.int32),
            chain_root=BlockKey(bytes(32)),
            tokens_per_block=T,
            sampling_params=SamplingParams(max_tokens=8),
        )
        found = run_request(manager, model, request, random)
        reused, partial = reused + found, partial + found % T
        if request.state is RequestState.GENERATION:
            live.append(request)
        while len(live) > int(random.integers(0, 3)):
            ended = live.pop(int(random.integers(len(live))))
            # Whoever shares blocks with it, or copied from them, has not touched what it computed.
            model.check(ended, ended.num_computed_tokens)
            manager.free_resources(ended)
        manager.blocks.check_invariants()
    assert reused > 60
    assert partial > 15
