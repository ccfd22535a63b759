"""Blocks as values of one byte: how exact, what of numbers that are none, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigurationError
from kvconnect.kernels.quantized_payload import (
    dequantize_payload,
    quantize_payload,
    quantize_rows,
    quantized_nbytes,
)
from kvconnect.layout import KvCacheLayout

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
LIMITS = {"fp8_e4m3": 448.0, "int8": 127.0}
CODES = tuple(LIMITS)
STORED = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LAYOUTS = {
    "even": KvCacheLayout(3, 2, 96, 96, 16, torch.bfloat16),
    "uneven": KvCacheLayout(2, 2, 5, 3, 4, torch.float32),
    "latent": KvCacheLayout(2, 1, 576, 0, 4, torch.float16),
}
SMALL = KvCacheLayout(1, 1, 4, 4, 2, torch.float32)
"""Two rows of keys, then two of values."""


@st.composite
def layouts(draw):
    number = st.integers(1, 3)
    dims = draw(st.sampled_from([(8, 8), (5, 3), (96, 96), (7, 0), (1, 1)]))
    return KvCacheLayout(draw(number), draw(number), *dims, 1 << draw(number), draw(dtypes))


dtypes = st.sampled_from([*FLOATS, torch.float64])


def filled(layout, seed=0):
    """A block of sensible numbers, as bytes."""
    generator = torch.Generator().manual_seed(seed)
    count = layout.block_nbytes // layout.dtype.itemsize
    numbers = torch.randn(count, generator=generator) * 10
    return numbers.to(layout.dtype).view(torch.uint8)


def rows_of(payload, layout):
    """All rows of a block in order, as float32: of keys, or of values, of one layer each."""
    heads = layout.tokens_per_block * layout.num_kv_heads
    rest, found = payload.view(layout.dtype).float(), []
    for _ in range(layout.num_layers):
        for dim in (layout.key_dim, layout.value_dim)[: 2 if layout.value_dim else 1]:
            found.append(rest[: heads * dim].view(heads, dim))
            rest = rest[heads * dim :]
    return found


def quantised(payload, layout, code):
    """Values and scales of `payload`."""
    encoded = torch.full((quantized_nbytes(layout),), 0xA5, dtype=torch.uint8)
    quantize_payload(payload, layout, encoded, dtype=code)
    count = sum(len(rows) for rows in rows_of(payload, layout))
    return encoded, encoded[4 * count :], encoded[: 4 * count].view(torch.float32)


def there_and_back(payload, layout, code):
    restored = torch.empty_like(payload)
    dequantize_payload(quantised(payload, layout, code)[0], layout, restored, dtype=code)
    return restored


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


@pytest.mark.parametrize("code", CODES)
@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(0, 99))
def test_values_and_scales_are_those_of_each_row(code, layout, seed):
    payload = filled(layout, seed)
    before = payload.clone()
    expected = [expected_of(rows, code) for rows in rows_of(payload, layout)]
    _, values, scales = quantised(payload, layout, code)
    assert torch.equal(values, torch.cat([part[0] for part in expected]))
    assert torch.equal(scales, torch.cat([part[1] for part in expected]))
    assert torch.equal(payload, before)


@pytest.mark.parametrize("code", CODES)
@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(0, 99))
def test_what_comes_back_is_close(code, layout, seed):
    payload = filled(layout, seed)
    restored = there_and_back(payload, layout, code)
    for new, old in zip(rows_of(restored, layout), rows_of(payload, layout), strict=True):
        largest = old.abs().amax(1, keepdim=True)
        # Half a step of the code, and the rounding to the block's dtype.
        step = largest / 254 if code == "int8" else old.abs() / 16 + largest / 448 / 1024
        rounding = 2 * max(torch.finfo(layout.dtype).eps, 2**-23) * largest
        assert ((new - old).abs() <= step * 1.001 + rounding).all()


@pytest.mark.parametrize("code", CODES)
def test_rows_that_are_no_ordinary_numbers(code):
    rows = torch.tensor(
        [
            [0.0, 0.0, 0.0, 0.0],
            [1e-45, 0.0, -1e-45, 0.0],  # the smallest there are
            [1.0, torch.inf, 2.0, 0.0],
            [1.0, torch.nan, 2.0, 0.0],
        ]
    )
    payload = rows.view(-1).view(torch.uint8)
    _, _, scales = quantised(payload, SMALL, code)
    assert scales[:2].tolist() == [0.0, 0.0]
    assert scales[2:].isnan().all()
    restored = there_and_back(payload, SMALL, code).view(torch.float32).view(4, 4)
    assert restored[:2].eq(0).all()
    assert restored[2:].isnan().all()


@pytest.mark.parametrize("code", CODES)
def test_the_largest_element_comes_back_nearly_exactly(code):
    row = torch.tensor([3.4e38, -3.4e38, 1.0, 0.0])
    new = there_and_back(row.repeat(4).view(torch.uint8), SMALL, code).view(torch.float32)
    assert torch.allclose(new.view(4, 4)[:, :2], row[:2], rtol=1e-6)


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


def plainly_quantized(rows, code):
    """The values and scales that `quantize_rows` returns, in the plainest code."""
    limit, exact = LIMITS[code], rows.float()
    largest = exact.abs().amax(-1, keepdim=True)
    finite = exact.isfinite().all(-1, keepdim=True)
    # Not `limit / largest`: torch makes a reciprocal and a product of that, rounded twice.
    inverse = (torch.full_like(largest, limit) / largest).clamp(max=torch.finfo(torch.float32).max)
    scaled = torch.where(finite & (largest > 0), exact * inverse, 0.0).clamp(-limit, limit)
    scales = torch.where(finite, largest / limit, torch.nan)
    scaled = scaled if code == "fp8_e4m3" else scaled.round()
    return scaled.to(STORED[code]), scales.squeeze(-1)


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
    for fast, plain in zip(quantize_rows(rows, code), plainly_quantized(rows, code), strict=True):
        assert torch.equal(fast.view(torch.uint8), plain.view(torch.uint8))
    assert torch.equal(rows.view(torch.uint8), before.view(torch.uint8))
