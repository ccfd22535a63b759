"""Every order moves just the bytes it names, against plain indexing; on the CPU and on CUDA."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from copy_orders import give, some_order
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.memory.copier import TensorCopier
from kvconnect.cache.memory.pool_tensor import (
    allocate_host_pool,
    allocate_pool,
    layer_buffers,
)
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout

CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
T = 4
MODELS = {
    "fp32": [KvCacheLayout(3, 2, 5, 5, T, torch.float32)],
    "latent": [KvCacheLayout(2, 1, 6, 0, T, torch.float32)],
    "keys and values differ": [KvCacheLayout(2, 2, 5, 3, T, torch.bfloat16)],
    "fp8": [KvCacheLayout(2, 3, 5, 5, T, torch.float8_e4m3fn)],
    "windows": [
        KvCacheLayout(1, 2, 4, 4, T, torch.bfloat16, None, (5,)),
        KvCacheLayout(3, 2, 4, 4, T, torch.bfloat16, 64, (1, 2, 4)),
        KvCacheLayout(2, 1, 3, 2, T, torch.bfloat16, 16, (0, 3)),
    ],
    "mixed": [
        KvCacheLayout(2, 2, 4, 4, T, torch.bfloat16),
        KvCacheLayout(2, 2, 4, 4, T, torch.float8_e4m3fn, 8),
    ],
}
NUM_BLOCKS = 6
NUM_HOST_BLOCKS = 4


def fill(tensor, seed):
    values = torch.randint(
        0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    tensor.view(torch.uint8).copy_(values.view(tensor.view(torch.uint8).shape))


class Naive:
    """The pools as bytes of single tokens: ``[group][block, layer, token]`` of keys and of values.

    Made from `layer_buffers`, as attention sees them, and written to with plain indexing.
    """

    def __init__(self, pools, host_pools, layouts):
        self.layouts = layouts
        self.pools = [self._tokens(*both) for both in zip(pools, layouts, strict=True)]
        self.host_pools = [self._tokens(*both) for both in zip(host_pools, layouts, strict=True)]

    def _tokens(self, pool, layout):
        pool, parts = pool.cpu().clone(), ([], [])
        for layer in range(layout.num_layers):
            buffers = layer_buffers(pool, layout, layer)
            views = (buffers[:, 0], buffers[:, 1]) if torch.is_tensor(buffers) else buffers
            for part, view in zip(parts, views, strict=True):
                part.append(view.contiguous().view(torch.uint8))
        return [torch.stack(part, dim=1) for part in parts]

    def onboard(self, group, host_ids, ids):
        self.copy(self.host_pools[group], host_ids, self.pools[group], ids)

    def offload(self, group, ids, host_ids):
        self.copy(self.pools[group], ids, self.host_pools[group], host_ids)

    def move(self, group, sources, targets):
        self.copy(self.pools[group], sources, self.pools[group], targets)

    def copy_tokens(self, group, source, target, num_tokens, *, from_host=False):
        pools = self.host_pools if from_host else self.pools
        self.copy(pools[group], [source], self.pools[group], [target], num_tokens)

    def copy(self, source, source_ids, target, target_ids, num_tokens=T):
        for old, new in zip(source, target, strict=True):
            for from_id, to_id in zip(source_ids, target_ids, strict=True):
                new[to_id, :, :num_tokens] = old[from_id, :, :num_tokens]

    def agrees_with(self, pools, host_pools):
        other = Naive(pools, host_pools, self.layouts)
        mine = [part for parts in (*self.pools, *self.host_pools) for part in parts]
        theirs = [part for parts in (*other.pools, *other.host_pools) for part in parts]
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("layouts", MODELS.values(), ids=MODELS)
def test_orders_copy_what_they_name_and_nothing_else(layouts, device):
    @settings(max_examples=40, deadline=None)
    @given(st.randoms(use_true_random=False), st.integers(1, 8), st.booleans())
    def check(random, num_orders, in_one_batch):
        pools = [allocate_pool(layout, NUM_BLOCKS, device) for layout in layouts]
        tiers = [allocate_host_pool(layout, NUM_HOST_BLOCKS, device) for layout in layouts]
        for seed, memory in enumerate(pools + tiers):
            fill(memory, seed)
        copier, naive = TensorCopier(pools, tiers, layouts), Naive(pools, tiers, layouts)
        with copier.together() if in_one_batch else nullcontext():
            for _ in range(num_orders):
                group = random.randrange(len(layouts))
                give(some_order(random, group, NUM_BLOCKS, NUM_HOST_BLOCKS, T - 1), copier, naive)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert naive.agrees_with(pools, tiers)

    check()


# ------------------------------------------------------------------ orders that make no sense

LAYOUT = MODELS["fp32"][0]


@pytest.fixture
def memory():
    pool = allocate_pool(LAYOUT, NUM_BLOCKS, CPU)
    tier = allocate_host_pool(LAYOUT, NUM_HOST_BLOCKS, CPU)
    fill(pool, 1)
    fill(tier, 2)
    return pool, tier


WRONG = {
    "primary below": (lambda c: c.onboard(0, [0, 1], [2, -1]), IndexError, "block -1"),
    "primary beyond": (lambda c: c.offload(0, [0, 6], [2, 1]), IndexError, "block 6"),
    "secondary beyond": (lambda c: c.onboard(0, [3, 4], [2, 1]), IndexError, "block 4"),
    "more sources": (lambda c: c.onboard(0, [1, 2], [1]), ValueError, "target_ids"),
    "target twice": (lambda c: c.offload(0, [1, 2], [1, 1]), ValueError, "twice"),
    "move into a source": (lambda c: c.move(0, [1, 2], [2, 3]), ValueError, "source"),
    "copy to itself": (lambda c: c.copy_tokens(0, 1, 1, 2), ValueError, "target"),
    "too many tokens": (lambda c: c.copy_tokens(0, 1, 2, T + 1), ValueError, "num_tokens"),
}


@pytest.mark.parametrize(("order", "error", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_order_copies_nothing(memory, order, error, words):
    naive = Naive(memory[:1], memory[1:], [LAYOUT])
    with pytest.raises(error, match=words):
        order(TensorCopier(memory[:1], memory[1:], [LAYOUT]))
    assert naive.agrees_with(memory[:1], memory[1:])


def test_without_a_host_tier_there_is_none_to_copy_from(memory):
    copier = TensorCopier([memory[0]], [None], [LAYOUT])
    copier.copy_tokens(0, 1, 2, 3)
    with pytest.raises(ConfigurationError, match="group 0 has no host tier"):
        copier.onboard(0, [0], [0])
    with pytest.raises(ConfigurationError, match="no host tier"):
        copier.copy_tokens(0, 0, 2, 3, from_host=True)


@pytest.mark.parametrize(
    ("pools", "tiers", "name"),
    [
        ([], [], "pools"),
        ([torch.zeros(LAYOUT.flat_shape(2))], [], "pools"),
        ([torch.zeros(LAYOUT.flat_shape(2), dtype=torch.float64)], [None], r"pools\[0\]"),
        ([torch.zeros(LAYOUT.flat_shape(4))[::2]], [None], r"pools\[0\]"),
        ([torch.zeros(LAYOUT.flat_shape(2))], [torch.zeros(2, 3)], r"host_pools\[0\]"),
    ],
    ids=["none", "unequal", "dtype", "gaps", "shape"],
)
def test_pools_that_do_not_fit_are_refused(pools, tiers, name):
    with pytest.raises(ConfigurationError, match=name):
        TensorCopier(pools, tiers, [LAYOUT])


def test_an_empty_host_tier_is_no_error(memory):
    tier = allocate_host_pool(LAYOUT, 0, CPU)
    copier = TensorCopier([memory[0]], [tier], [LAYOUT])
    copier.onboard(0, [], [])
    with pytest.raises(IndexError):
        copier.onboard(0, [0], [0])
