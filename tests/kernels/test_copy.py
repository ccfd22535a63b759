"""Copies of single blocks, against plain indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.copy import block_rows, copy_blocks, copy_in, copy_out, copy_tokens
from kvconnect.layout import KvCacheLayout

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
NUM_BLOCKS = 5


@st.composite
def layouts(draw):
    key_dim = draw(st.sampled_from([1, 2, 5, 80, 96]))
    return KvCacheLayout(
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 3)),
        key_dim=key_dim,
        value_dim=draw(st.sampled_from([key_dim, 0, 3])),
        tokens_per_block=draw(st.sampled_from([2, 4, 16])),
        dtype=draw(st.sampled_from(DTYPES)),
    )


def random_pool(layout, device="cpu"):
    shape = layout.flat_shape(NUM_BLOCKS)
    nbytes = NUM_BLOCKS * layout.block_nbytes
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    return data.view(layout.dtype).view(shape).to(device)


def as_bytes(tensor):
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def poisoned(layout):
    return torch.full((layout.block_nbytes,), 0xA5, dtype=torch.uint8)


def same_bytes(left, right):
    return torch.equal(as_bytes(left), as_bytes(right))


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_in_are_the_blocks_bytes(device):
    @settings(max_examples=60, deadline=None)
    @given(layouts(), st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1))
    def check(layout, source, target):
        pool = random_pool(layout, device)
        before, out = pool.clone(), poisoned(layout)
        copy_out(pool, source, out)
        assert torch.equal(out, as_bytes(before[source]))
        assert same_bytes(pool, before)
        copy_in(out, pool, target)
        expected = before.clone()
        expected[target] = before[source]
        assert same_bytes(pool, expected)

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_in_writes_just_the_layers_that_are_asked_for(device):
    @settings(max_examples=60, deadline=None)
    @given(st.data(), layouts(), st.integers(0, NUM_BLOCKS - 1))
    def check(data, layout, target):
        stop = data.draw(st.integers(0, layout.num_layers))
        layers = range(data.draw(st.integers(0, stop)), stop)
        pool = random_pool(layout, device)
        other = random_pool(layout)[0]
        expected = pool.clone()
        for layer in layers:
            expected[target, layer] = other[layer].to(device)
        copy_in(as_bytes(other), pool, target, layers)
        assert same_bytes(pool, expected)

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_tokens_are_copied_and_no_others(device):
    @settings(max_examples=100, deadline=None)
    @given(st.data(), layouts())
    def check(data, layout):
        size = layout.tokens_per_block
        count = data.draw(st.sampled_from([0, 1, size - 1, size]) | st.integers(0, size))
        source, target = data.draw(st.permutations(range(NUM_BLOCKS)))[:2]
        pool = random_pool(layout, device)
        expected = pool.clone()
        for planes in split(expected, layout):
            planes[target, :, :, :count] = planes[source, :, :, :count]
        copy_tokens(pool, layout, source, target, count)
        assert same_bytes(pool, expected)

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_another_pool_are_copied(device):
    @settings(max_examples=60, deadline=None)
    @given(st.data(), layouts())
    def check(data, layout):
        count = data.draw(st.integers(0, layout.tokens_per_block))
        source, target = data.draw(st.tuples(*[st.integers(0, NUM_BLOCKS - 1)] * 2))
        pool, host = random_pool(layout, device), random_pool(layout)
        if device == "cuda":
            host = host.pin_memory()
        expected = pool.cpu().clone()
        for new, old in zip(split(expected, layout), split(host, layout), strict=True):
            new[target, :, :, :count] = old[source, :, :, :count]
        copy_tokens(pool, layout, source, target, count, source_pool=host)
        assert same_bytes(pool, expected)

    check()


ids = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_BLOCKS)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_copied_one_by_one_or_in_runs(device):
    @settings(max_examples=100, deadline=None)
    @given(layouts(), ids, ids)
    def check(layout, sources, targets):
        count = min(len(sources), len(targets))
        sources, targets = sources[:count], targets[:count]
        pool, host = block_rows(random_pool(layout, device)), block_rows(random_pool(layout))
        if device == "cuda":
            host = host.pin_memory()
        for source, target in ((pool, host), (host, pool)):
            expected = target.clone()
            for from_id, to_id in zip(sources, targets, strict=True):
                expected[to_id] = source[from_id]
            copy_blocks(source, sources, target, targets)
            if device == "cuda":
                torch.cuda.synchronize()
            assert torch.equal(target, expected)

    check()


def test_blocks_that_follow_each_other_are_one_run(monkeypatch):
    runs = []
    rows = torch.zeros(12, 8, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, rows, **_: runs.append(len(rows)))
    copy_blocks(rows, [0, 1, 2, 5, 6, 7, 9], rows[:], [4, 5, 6, 7, 8, 2, 3])
    assert runs == [3, 2, 1, 1]


def test_blocks_that_do_not_fit_are_refused():
    pool = block_rows(random_pool(LAYOUT))
    before = pool.clone()
    for sources, targets in (([0], [1, 2]), ([0, 1], [2, 2]), ([0, 1], [1, 2])):
        with pytest.raises(ConfigurationError, match="target_ids"):
            copy_blocks(pool, sources, pool, targets)
    with pytest.raises(ConfigurationError, match="bytes"):
        copy_blocks(pool, [0], torch.zeros(3, 7, dtype=torch.uint8), [0])
    for sources, targets in (([-1], [1]), ([1], [NUM_BLOCKS])):
        with pytest.raises(IndexError):
            copy_blocks(pool, sources, pool, targets)
    assert torch.equal(pool, before)


def split(pool, layout):
    """Views ``[blocks, layers, planes, tokens, elements]`` of keys and values."""
    size, heads = layout.tokens_per_block, layout.num_kv_heads
    if layout.kv_factor == 2:
        return [pool.unflatten(3, (size, heads * layout.key_dim))]
    keys = size * heads * layout.key_dim
    views = [pool[..., :keys].unflatten(3, (size, heads * layout.key_dim))]
    if layout.value_dim:
        views.append(pool[..., keys:].unflatten(3, (size, heads * layout.value_dim)))
    return views


LAYOUT = KvCacheLayout(2, 1, 3, 3, 4, torch.float32)


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_a_block_outside_the_pool_is_an_index_error(block):
    pool, buffer = random_pool(LAYOUT), poisoned(LAYOUT)
    before = pool.clone()
    with pytest.raises(IndexError):
        copy_out(pool, block, buffer)
    with pytest.raises(IndexError):
        copy_in(buffer, pool, block)
    with pytest.raises(IndexError):
        copy_tokens(pool, LAYOUT, 0, block, 1)
    with pytest.raises(IndexError):
        copy_tokens(pool, LAYOUT, block, 0, 1)
    assert same_bytes(pool, before)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(LAYOUT.block_nbytes - 1, dtype=torch.uint8),
        torch.zeros(LAYOUT.block_nbytes, dtype=torch.int8),
        torch.zeros((1, LAYOUT.block_nbytes), dtype=torch.uint8),
    ],
    ids=["short", "signed", "two-dimensional"],
)
def test_a_buffer_that_is_not_the_blocks_bytes_is_refused(buffer):
    pool = random_pool(LAYOUT)
    with pytest.raises(ConfigurationError, match="out"):
        copy_out(pool, 0, buffer)
    with pytest.raises(ConfigurationError, match="src"):
        copy_in(buffer, pool, 0)


@pytest.mark.parametrize("layers", [range(3), range(-1, 1), range(0, 2, 2), range(2, 1)])
def test_layers_that_are_not_there_are_refused(layers):
    pool = random_pool(LAYOUT)
    before = pool.clone()
    with pytest.raises(ConfigurationError, match="layers"):
        copy_in(poisoned(LAYOUT), pool, 0, layers)
    assert same_bytes(pool, before)


def test_too_many_tokens_and_the_same_block_are_refused():
    pool = random_pool(LAYOUT)
    before = pool.clone()
    for count in (-1, 5):
        with pytest.raises(ConfigurationError, match="num_tokens"):
            copy_tokens(pool, LAYOUT, 0, 1, count)
    with pytest.raises(ConfigurationError, match="target"):
        copy_tokens(pool, LAYOUT, 1, 1, 2)
    assert same_bytes(pool, before)
