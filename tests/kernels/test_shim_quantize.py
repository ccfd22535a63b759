"""quantize_blocks and dequantize_blocks: the CUDA source against plain torch, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_cases import POISON, Case, at_offset, shapes
from shim_runs import driver_of, grids, in_two_lengths, same_bytes

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.cuda import device
from kvconnect.kernels.host import reference
from kvconnect.kernels.quantize import dequantize_blocks, quantize_blocks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODES = ["fp8_e4m3", "int8"]


def same_numbers(one, other):
    """Bit for bit, but for which NaN it is."""
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and same_bytes(
        one.masked_fill(nan, 0), other.masked_fill(nan, 0)
    )


def expected_of(kv, ids, code, count):
    values = torch.full((count, kv.block_nbytes // kv.dtype.itemsize), POISON, dtype=torch.uint8)
    scales = torch.full((count, len(kv.views) * kv.tokens * kv.heads), math.pi)
    for row, block in enumerate(ids):
        if block >= 0:
            made = [reference.quantize(view[block], code) for view in kv.views]
            values[row] = torch.cat([value.reshape(-1) for value, _ in made])
            scales[row] = torch.cat([scale.reshape(-1) for _, scale in made])
    return values, scales


@st.composite
def blocks(draw):
    case = Case(draw(shapes(dtypes=DTYPES)), draw(st.integers(0, 99)))
    if draw(st.booleans()):  # random bytes are wild numbers; these are tame
        for view in case.kv.views:
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(7)))
    ids = draw(st.lists(st.integers(-1, case.kv.num_blocks - 1), min_size=1, max_size=4))
    return case, ids, draw(st.sampled_from(CODES)), draw(st.sampled_from([0, 8, 1])), draw(grids)


def check_quantize(shim, given_case):
    case, ids, code, shift, ctas = given_case
    kv = case.kv
    want_values, want_scales = expected_of(kv, ids, code, len(ids))
    values = at_offset(want_values.numel(), shift).view(want_values.shape)
    scales = torch.full_like(want_scales, math.pi)
    driver, policy = driver_of(shim, ctas, reads=case.tensors, writes=[values, scales])
    with device.driven_by(driver, policy):
        quantize_blocks(kv, ids, values, scales, dtype=code).wait()
    assert torch.equal(values, want_values)
    assert same_numbers(scales, want_scales)
    assert driver.launched or max(ids) < 0


@in_two_lengths
def test_quantize_writes_just_the_values_and_scales_of_its_blocks(shim, profile):
    profile(given(blocks())(lambda case: check_quantize(shim, case)))()


def check_dequantize(shim, given_case):
    case, ids, code, shift, ctas = given_case
    kv = case.kv
    ids = list(dict.fromkeys(ids))
    made, scales = expected_of(kv, ids, code, len(ids))
    values = at_offset(made.numel(), shift, made.view(-1)).view(made.shape)
    before = [memory.clone() for memory in case.tensors]
    driver, policy = driver_of(shim, ctas, reads=[values, scales], writes=case.tensors)
    with device.driven_by(driver, policy):
        dequantize_blocks(values, scales, kv, ids, dtype=code).wait()
    written = [view.clone() for view in kv.views]
    for memory, old in zip(case.tensors, before, strict=True):
        memory.copy_(old)
    for row, block in enumerate(ids):
        if block >= 0:
            sizes = [view[block].numel() for view in kv.views]
            counts = [view[block][..., 0].numel() for view in kv.views]
            parts = zip(values[row].split(sizes), scales[row].split(counts), kv.views, strict=True)
            for value, scale, view in parts:
                target = view[block]
                rows = value.view(target.shape).contiguous()
                target.copy_(
                    reference.dequantize(rows, scale.view(target.shape[:-1]), code, kv.dtype)
                )
    assert all(map(same_numbers, written, kv.views))


@in_two_lengths
def test_dequantize_writes_just_its_blocks(shim, profile):
    profile(given(blocks())(lambda case: check_dequantize(shim, case)))()


def quantized(shim, rows, code):
    """One block, one layer, keys only, one head: each token is a row."""
    view = rows.view(1, len(rows), 1, rows.shape[1]).clone()
    kv = PagedKv.from_views([view])
    values = torch.empty(1, rows.numel(), dtype=torch.uint8)
    scales = torch.empty(1, len(rows))
    driver, policy = driver_of(shim, 3, reads=[view], writes=[values, scales])
    with device.driven_by(driver, policy):
        quantize_blocks(kv, [0], values, scales, dtype=code)
    return values.view(rows.shape), scales.view(-1)


@pytest.mark.parametrize("code", CODES)
def test_every_value_of_16_bits_is_quantised_like_torch_does(shim, code):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        finite = every.view(dtype)
        finite = finite[finite.isfinite()]
        rows = finite[: len(finite) // 64 * 64].view(-1, 64)
        values, scales = quantized(shim, rows, code)
        want_values, want_scales = reference.quantize(rows, code)
        assert torch.equal(values, want_values)
        assert torch.equal(scales, want_scales)


@pytest.mark.parametrize("code", CODES)
def test_rows_of_zeros_tiny_huge_and_no_numbers(shim, code):
    tiny, huge = 1e-45, torch.finfo(torch.float32).max
    rows = torch.tensor(
        [
            [0.0] * 8,
            [-0.0] * 8,
            [tiny] + [0.0] * 7,
            [huge, -huge, 1.0] + [0.0] * 5,
            [math.nan] + [1.0] * 7,
            [1.0, math.inf] + [1.0] * 6,
            [-math.inf] * 8,
            [448.0, 447.9, 432.0, 1e-3, 2**-9, 2**-10, -3e-3, 0.5],
        ]
    )
    values, scales = quantized(shim, rows, code)
    want_values, want_scales = reference.quantize(rows, code)
    assert torch.equal(values, want_values)
    assert same_numbers(scales, want_scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-3, 3e-8, 1e-42, 200.0, 1e38, math.nan])
def test_every_code_is_dequantised_like_torch_does(shim, dtype, code, scale):
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(1, 256)
    scales = torch.full((1, 1), scale)
    view = torch.zeros(1, 1, 1, 256, dtype=dtype)
    kv = PagedKv.from_views([view])
    driver, policy = driver_of(shim, 2, reads=[values, scales], writes=[view])
    with device.driven_by(driver, policy):
        dequantize_blocks(values, scales, kv, [0], dtype=code)
    want = reference.dequantize(values, scales.view(1), code, dtype)
    assert same_numbers(view.view(1, 256), want)


@pytest.mark.parametrize("dim", [512, 576, 1000, 2048, 4096])
def test_rows_longer_than_the_registers_of_their_threads(shim, dim):
    rows = torch.randn(3, dim)
    values, scales = quantized(shim, rows, "fp8_e4m3")
    want_values, want_scales = reference.quantize(rows, "fp8_e4m3")
    assert torch.equal(values, want_values)
    assert torch.equal(scales, want_scales)
