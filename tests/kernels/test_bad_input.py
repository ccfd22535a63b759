"""Bad input to the copies: which error, in which words, and that nothing was written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import Shape

from kvconnect.kernels.copy import copy_blocks, gather_blocks, scatter_blocks

SHAPE = Shape("pool", "NHD", torch.float32, 2, 4, 4, 2, 8, 8)
NBYTES = 2 * 2 * 4 * 2 * 8 * 4


def rows(count, nbytes=NBYTES, dtype=torch.uint8):
    return torch.zeros(count, nbytes // dtype.itemsize, dtype=dtype)


BOTH = {
    "beyond": ([0, 4], rows(2), {}, IndexError, "block 4"),
    "below": ([0, -2], rows(2), {}, IndexError, "block -2"),
    "numbers": ([0.5], rows(1), {}, TypeError, "integers"),
    "booleans": (torch.tensor([True]), rows(1), {}, TypeError, "integers"),
    "axes": ([[0, 1]], rows(2), {}, ValueError, "block_ids"),
    "few rows": ([0, 1], rows(1), {}, ValueError, "2 blocks"),
    "many rows": ([0], rows(2), {}, ValueError, "1 blocks"),
    "short rows": ([0], rows(1, NBYTES - 4), {}, ValueError, str(NBYTES)),
    "other dtype": ([0], rows(1, dtype=torch.float16), {}, TypeError, "float16"),
    "no tensor": ([0], np.zeros((1, NBYTES), np.uint8), {}, TypeError, "tensor"),
    "columns": ([0, 1], rows(2, NBYTES * 2)[:, ::2], {}, ValueError, "strides"),
    "rows that overlap": ([0, 1], rows(1).expand(2, -1), {}, ValueError, "strides"),
    "layers beyond": ([0], rows(1), {"layers": range(3)}, ValueError, "layers"),
    "every other layer": ([0], rows(1), {"layers": slice(0, 2, 2)}, ValueError, "layers"),
    "layers backwards": ([0], rows(1), {"layers": range(2, 0, -1)}, ValueError, "layers"),
    "one layer": ([0], rows(1), {"layers": 1}, TypeError, "layers"),
    "rows of all layers": ([0], rows(1), {"layers": slice(1)}, ValueError, str(NBYTES // 2)),
    "path": ([0], rows(1), {"path": "kernels"}, ValueError, "'kernel'"),
    "no device": ([0], rows(1), {"path": "kernel"}, RuntimeError, "CUDA"),
    "no dma": ([0], rows(1), {"path": "dma"}, RuntimeError, "CUDA"),
    "nothing staged": ([0], rows(1), {"path": "staged"}, RuntimeError, "CUDA"),
}


@pytest.mark.parametrize(("ids", "buffer", "keywords", "error", "words"), BOTH.values(), ids=BOTH)
def test_gather_and_scatter(ids, buffer, keywords, error, words):
    cache = SHAPE.make(1)
    before = cache.memory.clone()
    with pytest.raises(error, match=words):
        gather_blocks(cache.kv, ids, buffer, **keywords)
    with pytest.raises(error, match=words):
        scatter_blocks(buffer, cache.kv, ids, **keywords)
    assert torch.equal(cache.memory, before)
    assert not torch.as_tensor(buffer).any()


def test_a_block_cannot_be_scattered_to_twice_but_gathered():
    cache = SHAPE.make(1)
    before = cache.memory.clone()
    for ids in ([1, 2, 1], [1, *[-1] * 80, 1]):
        buffer = rows(len(ids))
        with pytest.raises(ValueError, match="block 1 is given twice"):
            scatter_blocks(buffer, cache.kv, ids)
        gather_blocks(cache.kv, ids, buffer)
        assert torch.equal(buffer[0], buffer[-1])
    assert torch.equal(cache.memory, before)


def test_the_buffer_must_not_be_the_cache():
    cache = SHAPE.make(1)
    for start in (0, 64, cache.memory.numel() // 2 // 64 * 64):
        buffer = cache.memory[start : start + NBYTES]
        with pytest.raises(ValueError, match="shares memory"):
            gather_blocks(cache.kv, [0], buffer)


PAIRS = {
    "source beyond": ([(4, 0)], None, {}, IndexError, "source_ids: block 4"),
    "target beyond": ([(0, 1), (1, 6)], None, {}, IndexError, "target_ids: block 6"),
    "below": ([(0, -2)], None, {}, IndexError, "block -2"),
    "target twice": ([(0, 1), (2, 1)], None, {}, ValueError, "block 1 is given twice"),
    "triples": ([(0, 1, 2)], None, {}, ValueError, r"\[n, 2\]"),
    "flat": ([0, 1], None, {}, ValueError, "block_mapping"),
    "numbers": ([(0.0, 1.0)], None, {}, TypeError, "integers"),
    "tokens beyond": ([(0, 1)], [5], {}, ValueError, "num_tokens: 5"),
    "tokens below": ([(0, 1)], [-1], {}, ValueError, "num_tokens: -1"),
    "tokens for others": ([(0, 1)], [1, 2], {}, ValueError, "num_tokens: 2 for 1"),
    "tokens as numbers": ([(0, 1)], [1.5], {}, TypeError, "num_tokens"),
    "path": ([(0, 1)], None, {"path": "cuda"}, ValueError, "path"),
    "layers": ([(0, 1)], None, {"layers": range(1, 4)}, ValueError, "layers"),
    "no device": ([(0, 1)], None, {"path": "dma"}, RuntimeError, "CUDA"),
}


@pytest.mark.parametrize(
    ("pairs", "counts", "keywords", "error", "words"), PAIRS.values(), ids=PAIRS
)
def test_copy(pairs, counts, keywords, error, words):
    source = SHAPE.make(1)
    target = Shape("stacked", "NHD", torch.float32, 2, 6, 4, 2, 8, 8).make(2)
    before = target.memory.clone()
    with pytest.raises(error, match=words):
        copy_blocks(source.kv, target.kv, pairs, counts, **keywords)
    assert torch.equal(target.memory, before)


@pytest.mark.parametrize("length", [1, 100])
def test_a_target_must_not_be_a_source_of_the_same_memory(length):
    shape = Shape("pool", "NHD", torch.float32, 2, 300, 4, 2, 8, 8)
    cache = shape.make(1)
    before = cache.memory.clone()
    chain = [(index, index + 1) for index in range(length)]
    apart = [(index, index + length) for index in range(length)]
    if length > 1:
        with pytest.raises(ValueError, match="a source and a target"):
            copy_blocks(cache.kv, cache.kv, chain)
    with pytest.raises(ValueError, match="a source and a target"):
        copy_blocks(cache.kv, cache.kv, [*apart[1:], (200, 200)])
    # The same memory bound twice, the second time from block 2 on.
    from kvconnect.kernels.blocks.paged import PagedKv

    rest = PagedKv.from_layers([(view[2:], view[2:]) for view in cache.kv.views[:1]])
    first = PagedKv.from_layers([(view, view) for view in cache.kv.views[:1]])
    with pytest.raises(ValueError, match="a source and a target"):
        copy_blocks(first, rest, [(2, 0)])
    copied = [(2, 1)]
    copy_blocks(rest, first, [(pair[0] - 2, 5) for pair in copied])
    assert torch.equal(cache.kv.views[0][5], cache.kv.views[0][2])
    cache.memory.copy_(before)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dtype": torch.float16}, TypeError, "float16"),
        ({"layers": 1}, ValueError, "1 layers"),
        ({"tokens": 8}, ValueError, "8 tokens"),
        ({"heads": 1}, ValueError, "1 heads"),
        ({"key_dim": 4, "value_dim": 4}, ValueError, "of 4 and 4"),
        ({"form": "stacked", "layout": "HND"}, ValueError, "do not change layouts"),
    ],
    ids=["dtype", "layers", "tokens", "heads", "dim", "layout"],
)
def test_caches_that_differ(changes, error, words):
    from dataclasses import replace

    other = replace(SHAPE, **changes).make(2)
    before = other.memory.clone()
    with pytest.raises(error, match=words):
        copy_blocks(SHAPE.make(1).kv, other.kv, [(0, 1)])
    assert torch.equal(other.memory, before)


@pytest.mark.parametrize("empty", [[], [-1, -1], np.empty(0), torch.empty(0, dtype=torch.int64)])
def test_nothing_to_copy_is_done_at_once(empty):
    cache = SHAPE.make(1)
    before = cache.memory.clone()
    buffer = rows(len(empty))
    assert gather_blocks(cache.kv, empty, buffer).done()
    assert scatter_blocks(buffer, cache.kv, empty).done()
    assert copy_blocks(cache.kv, cache.kv, [(number, number) for number in empty]).done()
    assert torch.equal(cache.memory, before)
    assert not buffer.any()


@pytest.mark.parametrize("path", ["kernel", "dma", "staged", "torch"])
def test_nothing_to_copy_needs_no_device(path):
    cache = SHAPE.make(1)
    assert gather_blocks(cache.kv, [-1], rows(1), path=path).done()
