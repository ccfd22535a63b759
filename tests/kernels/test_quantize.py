"""Blocks as values of one byte: how exact, what of numbers that are none, and what is refused."""

from __future__ import annotations

import pytest
import torch
from caches import Shape, ids, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.copy import gather_blocks
from kvconnect.kernels.host import reference
from kvconnect.kernels.host.quantize import quantize_rows
from kvconnect.kernels.quantize import CODES, dequantize_blocks, quantize_blocks
from kvconnect.kernels.quantized_payload import (
    dequantize_payload,
    quantize_payload,
    quantized_nbytes,
)
from kvconnect.layout import KvCacheLayout

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
LIMITS = {"fp8_e4m3": 448.0, "int8": 127.0}
STORED = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def filled(shape, seed=0):
    """A cache of sensible numbers."""
    cache = shape.make(seed)
    generator = torch.Generator().manual_seed(seed)
    for view in cache.kv.views:
        view.copy_(torch.randn(view.shape, generator=generator) * 10)
    return cache


def rows_of(cache, block):
    """All rows of a block in order, as float32: ``[rows, dim]`` for each plane."""
    return [view[block].float().flatten(0, 1) for view in cache.kv.views]


def expected_of(rows, code):
    """Values and scales, row by row, as the module says."""
    values, scales = [], []
    for row in rows:
        largest = row.abs().max()
        limit = torch.tensor(LIMITS[code])
        scaled = row * (limit / largest) if largest > 0 else torch.zeros_like(row)
        scaled = scaled.clamp(-LIMITS[code], LIMITS[code])
        if code == "int8":
            scaled = scaled.round()
        values.append(scaled.to(STORED[code]).view(torch.uint8))
        scales.append(largest / LIMITS[code])
    return torch.cat(values), torch.stack(scales)


def buffers(cache, count):
    elements = cache.kv.block_nbytes // cache.kv.dtype.itemsize
    num_rows = len(cache.kv.views) * cache.kv.tokens * cache.kv.heads
    values = torch.full((count, elements), 0x5A, dtype=torch.uint8)
    return values, torch.full((count, num_rows), -1.0)


@pytest.mark.parametrize("code", CODES)
def test_values_and_scales_are_those_of_each_row(code):
    @settings(max_examples=40, deadline=None)
    @given(st.data(), shapes(FLOATS))
    def check(data, shape):
        cache = filled(shape)
        before = cache.memory.clone()
        numbers = data.draw(ids(shape, max_size=4))
        values, scales = buffers(cache, len(numbers))
        expected = values.clone(), scales.clone()
        for row, block in enumerate(numbers):
            if block >= 0:
                parts = [expected_of(rows, code) for rows in rows_of(cache, block)]
                expected[0][row] = torch.cat([part[0] for part in parts])
                expected[1][row] = torch.cat([part[1] for part in parts])
        quantize_blocks(cache.kv, numbers, values, scales, dtype=code)
        assert torch.equal(values, expected[0])
        assert torch.equal(scales, expected[1])
        assert torch.equal(cache.memory, before)

    check()


@pytest.mark.parametrize("code", CODES)
def test_what_comes_back_is_close_and_nothing_else_changes(code):
    @settings(max_examples=40, deadline=None)
    @given(st.data(), shapes(FLOATS))
    def check(data, shape):
        cache, target = filled(shape), filled(shape, 1)
        numbers = data.draw(ids(shape, unique=True, max_size=4))
        values, scales = buffers(cache, len(numbers))
        quantize_blocks(cache.kv, numbers, values, scales, dtype=code)
        expected = target.clone()
        typed = values.view(STORED[code])
        dequantize_blocks(typed, scales, target.kv, numbers, dtype=code)
        for block in range(shape.blocks):
            if block not in numbers:
                assert torch.equal(target.row(block), expected.row(block))
                continue
            for new, old in zip(rows_of(target, block), rows_of(cache, block), strict=True):
                largest = old.abs().amax(1, keepdim=True)
                # Half a step of the code, and the rounding to the cache's dtype.
                step = largest / 254 if code == "int8" else old.abs() / 16 + largest / 448 / 1024
                rounding = 2 * torch.finfo(shape.dtype).eps * largest
                assert ((new - old).abs() <= step * 1.001 + rounding).all()
            expected.put(block, target.row(block))
        assert torch.equal(target.memory, expected.memory)

    check()


SHAPE = Shape("pool", "NHD", torch.float32, 1, 3, 2, 1, 4, 4)


@pytest.mark.parametrize("code", CODES)
def test_rows_that_are_no_ordinary_numbers(code):
    cache = filled(SHAPE)
    rows = cache.kv.views[0][1].view(-1, 4)
    rows[0] = 0.0
    rows[1] = torch.tensor([1e-45, 0.0, -1e-45, 0.0])  # the smallest there are
    others = cache.kv.views[1][1].view(-1, 4)
    others[0] = torch.tensor([1.0, torch.inf, 2.0, 0.0])
    others[1] = torch.tensor([1.0, torch.nan, 2.0, 0.0])
    values, scales = buffers(cache, 1)
    quantize_blocks(cache.kv, [1], values, scales, dtype=code)
    assert scales[0, :2].tolist() == [0.0, 0.0]
    assert scales[0, 2:].isnan().all()
    dequantize_blocks(values, scales, cache.kv, [2], dtype=code)
    assert cache.kv.views[0][2].eq(0).all()
    assert cache.kv.views[1][2].isnan().all()


@pytest.mark.parametrize("code", CODES)
def test_the_largest_element_comes_back_nearly_exactly(code):
    cache = filled(SHAPE)
    for view in cache.kv.views:
        view[0] = torch.tensor([3.4e38, -3.4e38, 1.0, 0.0])
    values, scales = buffers(cache, 1)
    quantize_blocks(cache.kv, [0], values, scales, dtype=code)
    dequantize_blocks(values, scales, cache.kv, [1], dtype=code)
    new = cache.kv.views[0][1].view(-1, 4)
    assert torch.allclose(new[:, :2], torch.tensor([3.4e38, -3.4e38]), rtol=1e-6)


VALUES, SCALES = buffers(SHAPE.make(0), 1)
WRONG = {
    "code": ((VALUES, SCALES, [0], "fp4"), ValueError, "dtype"),
    "values dtype": ((VALUES.short(), SCALES, [0], "int8"), TypeError, "values"),
    "values of another code": (
        (VALUES.view(torch.int8), SCALES, [0], "fp8_e4m3"),
        TypeError,
        "val",
    ),
    "scales dtype": ((VALUES, SCALES.double(), [0], "int8"), TypeError, "scales"),
    "values": ((VALUES[:, :-1], SCALES, [0], "int8"), ValueError, "values"),
    "scales": ((VALUES, SCALES[:, 1:], [0], "int8"), ValueError, "scales"),
    "count": ((VALUES, SCALES, [0, 1], "int8"), ValueError, "values"),
    "id": ((VALUES, SCALES, [3], "int8"), IndexError, "block_ids"),
}


@pytest.mark.parametrize(("arguments", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_and_nothing_written(arguments, error, words):
    cache = filled(SHAPE)
    values, scales, numbers, code = arguments
    before = cache.memory.clone(), values.clone(), scales.clone()
    with pytest.raises(error, match=words):
        quantize_blocks(cache.kv, numbers, values, scales, dtype=code)
    with pytest.raises(error, match=words):
        dequantize_blocks(values, scales, cache.kv, numbers, dtype=code)
    for now, then in zip((cache.memory, values, scales), before, strict=True):
        assert torch.equal(now, then)


def test_a_block_cannot_be_restored_twice_nor_one_of_other_numbers_quantised():
    cache = filled(SHAPE)
    values, scales = buffers(cache, 2)
    with pytest.raises(ValueError, match="twice"):
        dequantize_blocks(values, scales, cache.kv, [1, 1], dtype="int8")
    doubles = Shape("pool", "NHD", torch.float64, 1, 3, 2, 1, 4, 4).make(0)
    with pytest.raises(TypeError, match="float64"):
        quantize_blocks(doubles.kv, [0], values[:1], scales[:1], dtype="int8")


LAYOUTS = {
    "even": KvCacheLayout(3, 2, 96, 96, 16, torch.bfloat16),
    "uneven": KvCacheLayout(2, 2, 5, 3, 4, torch.float32),
    "latent": KvCacheLayout(2, 1, 576, 0, 4, torch.float16),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("code", CODES)
def test_a_payload_is_quantised_as_the_block_it_is(layout, code):
    shape = Shape(
        "flat",
        "NHD",
        layout.dtype,
        layout.num_layers,
        1,
        layout.tokens_per_block,
        layout.num_kv_heads,
        layout.key_dim,
        layout.value_dim,
    )
    cache = filled(shape)
    payload = torch.empty(layout.block_nbytes, dtype=torch.uint8)
    gather_blocks(cache.kv, [0], payload)
    encoded = torch.full((quantized_nbytes(layout),), 0xA5, dtype=torch.uint8)
    quantize_payload(payload, layout, encoded, dtype=code)
    values, scales = buffers(cache, 1)
    quantize_blocks(cache.kv, [0], values, scales, dtype=code)
    count = scales.numel()
    assert torch.equal(encoded[: 4 * count].view(torch.float32), scales[0])
    assert torch.equal(encoded[4 * count :], values[0])
    restored = torch.empty_like(payload)
    dequantize_payload(encoded, layout, restored, dtype=code)
    dequantize_blocks(values, scales, cache.kv, [0], dtype=code)
    assert torch.equal(restored, cache.row(0))


def test_a_payload_of_another_size_or_dtype_is_refused():
    layout = LAYOUTS["uneven"]
    payload = torch.zeros(layout.block_nbytes, dtype=torch.uint8)
    encoded = torch.zeros(quantized_nbytes(layout), dtype=torch.uint8)
    with pytest.raises(ConfigurationError, match="payload"):
        quantize_payload(payload[1:], layout, encoded, dtype="int8")
    with pytest.raises(ConfigurationError, match="encoded"):
        dequantize_payload(encoded[:-1], layout, payload, dtype="int8")
    with pytest.raises(ConfigurationError, match="dtype"):
        quantize_payload(payload, layout, encoded, dtype="int4")
    with pytest.raises(ConfigurationError, match="float8"):
        quantized_nbytes(KvCacheLayout(1, 1, 4, 4, 2, torch.float8_e4m3fn))


@pytest.mark.parametrize("code", CODES)
def test_any_bytes_of_the_right_length_give_some_block(code):
    layout = LAYOUTS["even"]
    generator = torch.Generator().manual_seed(0)
    size = (quantized_nbytes(layout),)
    encoded = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    dequantize_payload(
        encoded, layout, torch.empty(layout.block_nbytes, dtype=torch.uint8), dtype=code
    )


@pytest.mark.parametrize("code", CODES)
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(FLOATS), st.sampled_from([1, 5, 64, 96]))
def test_the_fast_loop_is_the_plain_one_bit_for_bit_whatever_the_bits(code, seed, dtype, dim):
    random = torch.Generator().manual_seed(seed)
    nbytes = 40 * dim * dtype.itemsize
    rows = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)
    rows = rows.view(dtype).view(40, dim)
    rows[:20] = torch.randn(20, dim, generator=random).to(dtype)
    before = rows.clone()
    for fast, plain in zip(quantize_rows(rows, code), reference.quantize(rows, code), strict=True):
        assert torch.equal(fast.view(torch.uint8), plain.view(torch.uint8))
    assert torch.equal(rows.view(torch.uint8), before.view(torch.uint8))
