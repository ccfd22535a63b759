"""Gather, scatter and copy against plain indexing: what is named is copied, and no more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import Shape, alike, ids, layer_ranges, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.copy import copy_blocks, gather_blocks, scatter_blocks

PATHS = ["auto", "torch"]
AS = [list, np.array, lambda ids: np.array(ids, np.int32), lambda ids: torch.tensor(ids).long()]
"""Forms in which ids come."""


def poisoned(count, nbytes, gap=0):
    """Rows of bytes that no cache holds all of, perhaps with something between them."""
    memory = torch.full((count, nbytes + gap), 0xA5, dtype=torch.uint8)
    return memory[:, :nbytes]


@st.composite
def buffers(draw, cache, count, layers):
    """A buffer of rows in one of its forms, and the same memory as bytes."""
    per_layer = sum(plane[0].numel() for plane in cache.of(range(1)))
    nbytes = per_layer * len(layers)
    rows = poisoned(count, nbytes, gap=draw(st.sampled_from([0, 64])))
    form = draw(st.sampled_from(["bytes", "typed", "axes", "flat"]))
    if form == "bytes" or not rows.is_contiguous():
        return rows, rows
    dtype = torch.uint8 if form == "flat" else cache.shape.dtype
    typed = rows.view(-1).view(dtype)
    if form == "flat" or not count:
        return (typed if form == "flat" else typed.view(count, -1)) if count else rows, rows
    inner = (len(layers), -1) if form == "axes" and layers else (-1,)
    return typed.view(count, *inner) if nbytes else rows, rows


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=shapes(), form=st.sampled_from(AS))
def test_gather_writes_the_rows_of_the_blocks(path, data, shape, form):
    cache = shape.make(1)
    numbers, layers = data.draw(ids(shape)), data.draw(layer_ranges(shape))
    out, rows = data.draw(buffers(cache, len(numbers), layers))
    expected, before = rows.clone(), cache.memory.clone()
    for row, block in enumerate(numbers):
        if block >= 0 and layers:
            expected[row] = cache.row(block, layers)
    done = gather_blocks(cache.kv, form(numbers), out, layers=layers, path=path)
    assert done.done()
    assert torch.equal(rows, expected)
    assert torch.equal(cache.memory, before)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=shapes(), form=st.sampled_from(AS))
def test_scatter_writes_the_blocks_of_the_rows(path, data, shape, form):
    cache = shape.make(1)
    numbers, layers = data.draw(ids(shape, unique=True)), data.draw(layer_ranges(shape))
    src, rows = data.draw(buffers(cache, len(numbers), layers))
    rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8))
    expected = cache.clone()
    for row, block in enumerate(numbers):
        if block >= 0:
            expected.put(block, rows[row], layers)
    scatter_blocks(src, cache.kv, form(numbers), layers=layers, path=path)
    assert torch.equal(cache.memory, expected.memory)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), shape=shapes(), form=st.sampled_from(AS))
def test_copy_goes_from_any_form_to_any_other(path, data, shape, form):
    source = shape.make(1)
    target = data.draw(alike(shape)).make(2)
    targets = data.draw(ids(target.shape, unique=True))
    numbers = st.lists(
        st.integers(-1, shape.blocks - 1), min_size=len(targets), max_size=len(targets)
    )
    pairs = list(zip(data.draw(numbers), targets, strict=True))
    counts = data.draw(st.none() | token_counts(shape, len(pairs)))
    layers = data.draw(layer_ranges(shape))
    expected, before = target.clone(), source.memory.clone()
    for index, (from_id, to_id) in enumerate(pairs):
        if from_id >= 0 and to_id >= 0:
            count = shape.tokens if counts is None else counts[index]
            expected.put_tokens(to_id, source, from_id, count, layers)
    mapping = form(pairs) if pairs else pairs
    copy_blocks(source.kv, target.kv, mapping, counts, layers=layers, path=path)
    assert torch.equal(target.memory, expected.memory)
    assert torch.equal(source.memory, before)


def token_counts(shape, length):
    size = shape.tokens
    count = st.sampled_from([0, 1, size - 1, size]) | st.integers(0, size)
    return st.lists(count, min_size=length, max_size=length)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=shapes())
def test_copy_within_a_cache(path, data, shape):
    cache = shape.make(1)
    order = data.draw(st.permutations(range(shape.blocks)))
    half = shape.blocks // 2
    pairs = list(zip(order[:half], order[half : 2 * half], strict=True))
    expected = cache.clone()
    for from_id, to_id in pairs:
        expected.put(to_id, cache.row(from_id))
    copy_blocks(cache.kv, cache.kv, pairs, path=path)
    assert torch.equal(cache.memory, expected.memory)


# Sizes at which other loops take over: few runs, through scratch, row by row, with threads.
SIZES = {
    "512 B": Shape("pool", "NHD", torch.bfloat16, 1, 400, 2, 1, 64, 64),
    "2 KiB": Shape("flat", "NHD", torch.float16, 2, 300, 2, 2, 64, 64),
    "2 KiB per plane": Shape("stacked", "NHD", torch.float16, 3, 200, 8, 2, 64, 64),
    "32 KiB": Shape("pool", "NHD", torch.float32, 2, 40, 16, 2, 64, 64),
    "32 KiB in heads": Shape("interleaved", "HND", torch.float32, 1, 40, 16, 4, 64, 64, (0, 0, 8)),
    "512 KiB": Shape("pool", "NHD", torch.float32, 4, 12, 32, 4, 128, 128),
    "latent": Shape("latent", "NHD", torch.bfloat16, 2, 60, 16, 1, 576, 0),
}


@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("padding", ["none", "last", "between"])
def test_many_blocks_of_every_size(shape, padding):
    cache, other = shape.make(1), shape.make(2)
    order = np.random.default_rng(0).permutation(shape.blocks)[: shape.blocks * 3 // 4]
    if padding == "last":
        order[-3:] = -1
    elif padding == "between":
        order[1::3] = -1
    rows = poisoned(len(order), cache.kv.block_nbytes)
    expected = rows.clone()
    for row, block in enumerate(order):
        if block >= 0:
            expected[row] = cache.row(block)
    gather_blocks(cache.kv, order, rows)
    assert torch.equal(rows, expected)
    target = other.clone()
    for row, block in enumerate(order):
        if block >= 0:
            target.put(block, expected[row])
    scatter_blocks(rows, other.kv, order)
    assert torch.equal(other.memory, target.memory)
    pairs = np.stack([np.roll(order, 1), order], axis=1)
    for from_id, to_id in pairs:
        if from_id >= 0 and to_id >= 0:
            target.put(to_id, cache.row(from_id))
    copy_blocks(cache.kv, other.kv, pairs)
    assert torch.equal(other.memory, target.memory)


@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_single_layers_and_first_tokens_of_many_blocks(shape):
    cache, other = shape.make(1), shape.make(2)
    target = other.clone()
    order = np.random.default_rng(1).permutation(shape.blocks)
    layers = range(shape.layers - 1, shape.layers)
    counts = np.arange(shape.blocks) % (shape.tokens + 1)
    for index, to_id in enumerate(order):
        target.put_tokens(to_id, cache, index, counts[index], layers)
    pairs = np.stack([np.arange(shape.blocks), order], axis=1)
    copy_blocks(cache.kv, other.kv, pairs, counts, layers=layers)
    assert torch.equal(other.memory, target.memory)


def test_what_inference_mode_made_can_be_copied_outside_of_it_and_the_other_way_round():
    with torch.inference_mode():
        inner = torch.rand(3, 1, 2, 2, 1, 4)
        inner_kv, inner_rows = PagedKv.from_pool(inner), torch.zeros(40, 64, dtype=torch.uint8)
    outer = torch.zeros(40, 1, 2, 2, 1, 4, requires_grad=True)
    outer_kv, outer_rows = PagedKv.from_pool(outer), torch.zeros(40, 64, dtype=torch.uint8)
    many = [2] * 40
    for rows in (inner_rows, outer_rows):
        gather_blocks(inner_kv, many, rows)
        assert torch.equal(rows[39].view(torch.float32), inner[2].flatten())
        scatter_blocks(rows, outer_kv, range(40))
        assert torch.equal(outer[39], inner[2])
    with torch.inference_mode():
        gather_blocks(outer_kv, many, outer_rows)
        scatter_blocks(outer_rows[:3], inner_kv, range(3))
        assert torch.equal(inner[0], inner[2])


@pytest.mark.parametrize("path", PATHS)
def test_numbers_of_tokens_belong_to_their_pairs_also_behind_padding(path):
    shape = Shape("pool", "NHD", torch.float32, 1, 6, 4, 1, 8, 8)
    cache, other = shape.make(1), shape.make(2)
    target = other.clone()
    target.put_tokens(2, cache, 1, 1, range(1))
    target.put_tokens(4, cache, 3, 2, range(1))
    pairs = [(-1, 0), (1, 2), (5, 5), (3, 4), (2, -1)]
    copy_blocks(cache.kv, other.kv, pairs, [4, 1, 0, 2, 3], path=path)
    assert torch.equal(other.memory, target.memory)
