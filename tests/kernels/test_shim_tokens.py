"""kv_cache_update, reshape_and_cache: the CUDA sources against plain torch."""

from __future__ import annotations

import pytest
import torch
from caches import POISON, at_offset, random_bytes, shapes
from hypothesis import given
from hypothesis import strategies as st
from shim_runs import driver_of, grids, in_two_lengths, same_bytes

from kvconnect.kernels.append import reshape_and_cache
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.work import AppendWork, UpdateWork
from kvconnect.kernels.cuda import device
from kvconnect.kernels.host import reference
from kvconnect.kernels.update import kv_cache_update

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
ids_of = st.sampled_from([torch.int32, torch.int64])


def tensor_of(sizes, dtype, seed=0, shift=0, order=None):
    """Random bytes in these sizes; in memory the axes come in `order`."""
    order = order or range(len(sizes))
    numel = torch.Size(sizes).numel()
    nbytes = numel * dtype.itemsize
    flat = at_offset(nbytes, shift, random_bytes(nbytes, seed)).view(dtype)
    inner = [sizes[axis] for axis in order]
    back = [list(order).index(axis) for axis in range(len(sizes))]
    return flat.view(inner).permute(back)


@st.composite
def updates(draw):
    batch, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    capacity, dim = draw(st.integers(1, 12)), draw(st.sampled_from([1, 3, 8, 40, 64]))
    dtype = draw(st.sampled_from(DTYPES))
    packed = draw(st.booleans())
    shift = draw(st.sampled_from([0, 16, 8])) // dtype.itemsize * dtype.itemsize
    order = draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)]))
    cache = tensor_of((batch, heads, capacity, dim), dtype, 1, shift, order)
    if packed:
        lengths = draw(st.lists(st.integers(0, capacity), min_size=batch, max_size=batch))
        order = draw(st.sampled_from([(0, 1, 2), (1, 0, 2)]))
        update = tensor_of((sum(lengths), heads, dim), dtype, 2, 0, order)
    else:
        lengths = [draw(st.integers(0, capacity))] * batch
        order = draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3)]))
        update = tensor_of((batch, heads, lengths[0], dim), dtype, 2, 0, order)
    starts = [draw(st.integers(0, capacity - length)) for length in lengths]
    ends = [sum(lengths[:i]) for i in range(batch + 1)]
    return cache, update, starts, ends if packed else None, draw(ids_of), draw(grids)


def check_update(shim, given_case):
    cache, update, starts, ends, id_dtype, ctas = given_case
    expected = cache.clone(memory_format=torch.preserve_format)
    write_indices = torch.tensor(starts, dtype=id_dtype)
    lengths = None if ends is None else torch.tensor(ends, dtype=id_dtype)
    ids = [write_indices] if lengths is None else [write_indices, lengths]
    driver, policy = driver_of(shim, ctas, reads=[update, *ids], writes=[cache])
    form = "padded_bhnd" if ends is None else "packed_nhd"
    with device.driven_by(driver, policy):
        result = kv_cache_update(cache, update, write_indices, lengths, update_form=form)
    if ends is None:
        reference.update_padded(expected, update, starts)
    else:
        reference.update_packed(expected, update, starts, ends)
    assert result is cache
    assert same_bytes(cache, expected)
    assert driver.launched or not update.numel()
    assert driver.take_errors() == 0


@in_two_lengths
def test_kv_cache_update_writes_just_the_new_tokens(shim, profile):
    profile(given(updates())(lambda case: check_update(shim, case)))()


def submit_unchecked(cache, update, starts, ends=None):
    """As if ids were on a device, where they are not looked at before."""
    device.device_work(cache.device).update(UpdateWork(cache, update, starts, ends))


@pytest.mark.parametrize("ctas", [1, 50])
def test_padded_sequences_that_do_not_fit_are_not_written_and_counted(shim, ctas):
    cache = tensor_of((5, 2, 8, 16), torch.float32, 1)
    update = tensor_of((5, 2, 3, 16), torch.float32, 2)
    starts = torch.tensor([5, 6, -1, 0, 2**40])
    expected = cache.clone()
    for i in (0, 3):
        expected[i, :, starts[i] : starts[i] + 3] = update[i]
    driver, policy = driver_of(shim, ctas, reads=[update, starts], writes=[cache])
    with device.driven_by(driver, policy):
        submit_unchecked(cache, update, starts)
    assert same_bytes(cache, expected)
    assert driver.take_errors() == 3


@pytest.mark.parametrize(
    ("ends", "starts", "written", "errors"),
    [
        ([0, 2, 4, 6], [0, 7, 6], [0, 2], 1),  # the second does not fit
        ([0, 2, 4, 6], [-1, 0, 0], [1, 2], 1),
        ([0, 5, 3, 6], [0, 0, 0], [0, 2], 1),  # decreasing
        ([0, 2, 4, 9], [0, 0, 0], [0, 1], 1),  # beyond the update
        ([-3, 2, 4, 6], [0, 0, 0], [1, 2], 1),
        ([9, 9, 9, 9], [0, 0, 0], [], 3),
        ([2, 2, 4, 6], [0, 0, 0], [1, 2], 0),  # two tokens of no sequence
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_lengths_that_cannot_be_do_no_harm(shim, ends, starts, written, errors, dtype):
    cache = tensor_of((3, 2, 8, 16), torch.float32, 1)
    update = tensor_of((6, 2, 16), torch.float32, 2)
    expected = cache.clone()
    lengths, indices = torch.tensor(ends, dtype=dtype), torch.tensor(starts, dtype=dtype)
    driver, policy = driver_of(shim, 2, reads=[update, lengths, indices], writes=[cache])
    with device.driven_by(driver, policy):
        submit_unchecked(cache, update, indices, lengths)
    for i in written:
        part = update[ends[i] : ends[i + 1]].transpose(0, 1)
        now = slice(starts[i], starts[i] + ends[i + 1] - ends[i])
        if ends[i] <= ends[i + 1] and ends == sorted(ends):
            expected[i, :, now] = part
            assert same_bytes(cache[i], expected[i])
    untouched = set(range(3)) - set(written)
    assert all(same_bytes(cache[i], expected[i]) for i in untouched)
    assert driver.take_errors() == errors


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 9, 100])
def test_the_sequence_of_a_packed_token_is_found_in_any_batch(shim, batch):
    cache = torch.zeros(batch, 1, 3, 4)
    counts = [i % 3 for i in range(batch)]
    ends = [sum(counts[:i]) for i in range(batch + 1)]
    update = torch.arange(ends[-1] * 4, dtype=torch.float32).view(ends[-1], 1, 4)
    starts = torch.ones(batch, dtype=torch.int64)
    lengths = torch.tensor(ends)
    expected = cache.clone()
    reference.update_packed(expected, update, starts.tolist(), ends)
    driver, policy = driver_of(shim, 3, reads=[update, starts, lengths], writes=[cache])
    with device.driven_by(driver, policy):
        submit_unchecked(cache, update, starts, lengths)
    assert torch.equal(cache, expected)


@st.composite
def appends(draw):
    case = draw(shapes()).make(draw(st.integers(0, 9)))
    kv = case.kv
    num_slots = kv.num_blocks * kv.tokens
    slots = draw(st.lists(st.integers(0, num_slots - 1), max_size=20, unique=True))
    slots += [-1] * draw(st.integers(0, 2))
    orders = st.sampled_from([(0, 1, 2), (1, 0, 2)])
    states = [
        tensor_of((len(slots), kv.heads, dim), kv.dtype, 70 + i, 0, draw(orders))
        for i, dim in enumerate((kv.key_dim, kv.value_dim)[: kv.per_layer])
    ]
    layer = draw(st.integers(0, kv.num_layers - 1))
    return case, states, draw(st.permutations(slots)), layer, draw(ids_of), draw(grids)


def check_append(shim, given_case):
    case, states, slots, layer, id_dtype, ctas = given_case
    kv = case.kv
    before = [memory.clone() for memory in case.tensors]
    mapping = torch.tensor(slots, dtype=id_dtype)
    driver, policy = driver_of(shim, ctas, reads=[*states, mapping], writes=case.tensors)
    value = states[1] if kv.per_layer == 2 else None
    with device.driven_by(driver, policy):
        reshape_and_cache(states[0], value, kv, mapping, layer=layer)
    written = [memory.clone() for memory in case.tensors]
    for memory, old in zip(case.tensors, before, strict=True):
        memory.copy_(old)
    views = kv.layer_views(range(layer, layer + 1))
    for state, view in zip(states, views, strict=True):
        reference.append(state, view if kv.layout == "NHD" else view.transpose(1, 2), slots)
    assert all(map(torch.equal, written, case.tensors))
    assert driver.launched or not slots


@in_two_lengths
def test_reshape_and_cache_writes_just_the_slots(shim, profile):
    profile(given(appends())(lambda case: check_append(shim, case)))()


def test_slots_on_the_device_that_are_none_are_skipped_and_counted_once(shim):
    keys = torch.full((3, 4, 1, 8), float(POISON))
    values = torch.full((3, 4, 1, 16), float(POISON))  # rows of two lengths: two launches
    kv = PagedKv.from_layers([(keys, values)])
    new_keys, new_values = torch.ones(4, 1, 8), torch.ones(4, 1, 16)
    slots = torch.tensor([12, -1, 11, -7])
    reads = [new_keys, new_values, slots]
    driver, policy = driver_of(shim, 2, reads=reads, writes=[keys, values])
    with device.driven_by(driver, policy):
        work = AppendWork((new_keys, new_values), kv, 0, slots)
        device.device_work(kv.device).append(work)
    assert driver.take_errors() == 2
    assert len(driver.launched) == 2
    for plane in (keys, values):
        assert (plane[2, 3] == 1).all()
        assert (plane == 1).sum() == plane[2, 3].numel()


@pytest.mark.parametrize("tokens", [1, 3, 5, 8, 10])
def test_blocks_of_any_number_of_tokens_take_new_ones(shim, tokens):
    keys = torch.zeros(7, tokens, 2, 4)
    kv = PagedKv.from_views([keys])
    states = torch.rand(7 * tokens, 2, 4)
    slots = torch.randperm(7 * tokens)
    driver, policy = driver_of(shim, 2, reads=[states, slots], writes=[keys])
    with device.driven_by(driver, policy):
        reshape_and_cache(states, None, kv, slots, layer=0)
    assert torch.equal(keys.view(-1, 2, 4)[slots], states)
