"""`kv_cache_update` writes just what the document of IKVCacheUpdateLayer says, in place."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.kernels.update import AttentionIOForm, KVCacheMode, kv_cache_update

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
]


def random_bytes(shape, dtype, seed, step=0):
    """A tensor of random bytes, perhaps with gaps between its innermost rows but one."""
    generator = torch.Generator().manual_seed(seed)
    width = (shape[-1] + step) * dtype.itemsize
    data = torch.randint(0, 256, (*shape[:-1], width), dtype=torch.uint8, generator=generator)
    return data.view(dtype)[..., : shape[-1]]


def same(left, right):
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@st.composite
def updates(draw):
    batch, heads = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    length, dim = draw(st.integers(1, 9)), draw(st.sampled_from([1, 5, 64, 80, 96]))
    dtype, gap = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0, 8]))
    cache = random_bytes((batch, heads, length, dim), dtype, 0, gap)
    if draw(st.booleans()):  # heads innermost
        cache = random_bytes((batch, length, heads, dim), dtype, 0, gap).transpose(1, 2)
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return cache, index_dtype


@settings(max_examples=120, deadline=None)
@given(st.data(), updates())
def test_padded(data, drawn):
    cache, index_dtype = drawn
    batch, heads, length, dim = cache.shape
    new = data.draw(st.integers(0, length))
    starts = data.draw(
        st.lists(st.integers(0, length - new), min_size=batch, max_size=batch), label="starts"
    )
    update = random_bytes(
        (batch, heads, new, dim), cache.dtype, 1, data.draw(st.sampled_from([0, 4]))
    )
    expected = cache.clone()
    for i in range(batch):
        for s in range(new):
            expected.view(torch.uint8)[i, :, starts[i] + s] = update.view(torch.uint8)[i, :, s]
    result = kv_cache_update(cache, update, torch.tensor(starts, dtype=index_dtype))
    assert result is cache
    assert same(cache, expected)


@settings(max_examples=120, deadline=None)
@given(st.data(), updates())
def test_packed(data, drawn):
    cache, index_dtype = drawn
    batch, heads, length, dim = cache.shape
    one_each = data.draw(st.booleans())
    counts = (
        [1] * batch
        if one_each
        else data.draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
    )
    starts = [data.draw(st.integers(0, length - count)) for count in counts]
    ends = [sum(counts[:i]) for i in range(batch + 1)]
    update = random_bytes(
        (ends[-1], heads, dim), cache.dtype, 1, data.draw(st.sampled_from([0, 4]))
    )
    expected = cache.clone()
    for i in range(batch):
        for s in range(counts[i]):
            row = update.view(torch.uint8)[ends[i] + s]
            expected.view(torch.uint8)[i, :, starts[i] + s] = row
    indices, lengths = (torch.tensor(numbers, dtype=index_dtype) for numbers in (starts, ends))
    result = kv_cache_update(cache, update, indices, lengths, update_form="packed_nhd")
    assert result is cache
    assert same(cache, expected)


@pytest.mark.parametrize(
    ("batch", "heads", "new"), [(2, 3, 300), (3, 4, 70), (32, 8, 1), (5, 7, 3), (1, 2, 1)]
)
def test_every_size(batch, heads, new):
    cache = torch.rand(batch, heads, 400, 128)
    update = torch.rand(batch, heads, new, 128)
    starts = torch.arange(batch) * 7 % (400 - new)
    expected = cache.clone()
    for i in range(batch):
        expected[i, :, starts[i] : starts[i] + new] = update[i]
    kv_cache_update(cache, update, starts)
    assert torch.equal(cache, expected)


def test_elements_that_are_not_contiguous_in_the_update():
    cache, update = torch.zeros(2, 3, 4, 5), torch.rand(2, 3, 5, 2).transpose(2, 3)
    kv_cache_update(cache, update, torch.tensor([1, 2]))
    assert torch.equal(cache[0, :, 1:3], update[0])
    assert torch.equal(cache[1, :, 2:4], update[1])


def test_out_may_be_the_cache_itself():
    cache, update = torch.zeros(1, 2, 4, 8), torch.rand(1, 2, 2, 8)
    for out in (None, cache, cache.view(cache.shape)):
        assert kv_cache_update(cache, update, torch.tensor([1]), out=out) is cache
    with pytest.raises(ValueError, match="out"):
        kv_cache_update(cache, update, torch.tensor([1]), out=torch.zeros_like(cache))
    with pytest.raises(ValueError, match="out"):
        kv_cache_update(cache, update, torch.tensor([1]), out=cache[:, :1])


def given_cache():
    return torch.rand(2, 3, 8, 4)


UPDATE = torch.rand(2, 3, 2, 4)
PACKED = torch.rand(5, 3, 4)
HERE = torch.tensor([0, 1])
ENDS = torch.tensor([0, 2, 5])
PACK = {"update_form": "packed_nhd"}
WRONG = {
    "negative": (
        (UPDATE, torch.tensor([0, -1])),
        {},
        (ValueError, IndexError),
        r"write_indices\[1\]",
    ),
    "beyond": ((UPDATE, torch.tensor([7, 0])), {}, (ValueError, IndexError), r"write_indices\[0\]"),
    "dtype": ((UPDATE.double(), HERE), {}, TypeError, "update"),
    "index dtype": ((UPDATE, HERE.float()), {}, TypeError, "write_indices"),
    "index bytes": ((UPDATE, HERE.to(torch.uint8)), {}, TypeError, "write_indices"),
    "batch": ((UPDATE[:1], HERE), {}, ValueError, "update"),
    "heads": ((UPDATE[:, :2], HERE), {}, ValueError, "update"),
    "dim": ((UPDATE[..., :2], HERE), {}, ValueError, "update"),
    "axes": ((UPDATE[0], HERE), {}, ValueError, "update"),
    "indices": ((UPDATE, torch.tensor([0])), {}, ValueError, "write_indices"),
    "index axes": ((UPDATE, HERE[None]), {}, ValueError, "write_indices"),
    "form": ((UPDATE, HERE), {"update_form": "packed"}, ValueError, "packed_nhd"),
    "form of another kind": ((UPDATE, HERE), {"update_form": 3}, ValueError, "packed_nhd"),
    "mode": ((UPDATE, HERE), {"cache_mode": "ring"}, ValueError, "linear"),
    "packed without lengths": ((PACKED, HERE), PACK, ValueError, "update_lengths"),
    "padded with lengths": ((UPDATE, HERE, ENDS), {}, ValueError, "update_lengths"),
    "not from 0": ((PACKED, HERE, torch.tensor([1, 2, 5])), PACK, ValueError, "from 1"),
    "decreasing": ((PACKED, HERE, torch.tensor([0, 6, 5])), PACK, ValueError, "decrease"),
    "too short": ((PACKED, HERE, torch.tensor([0, 2, 4])), PACK, ValueError, "0 to 5"),
    "too long": ((PACKED, HERE, torch.tensor([0, 2, 6])), PACK, ValueError, "0 to 5"),
    "few lengths": ((PACKED, HERE, torch.tensor([0, 5])), PACK, ValueError, "update_lengths"),
    "length dtype": ((PACKED, HERE, ENDS.float()), PACK, TypeError, "update_lengths"),
    "packed beyond": (
        (PACKED, torch.tensor([0, 6]), ENDS),
        PACK,
        (ValueError, IndexError),
        r"write_indices\[1\]",
    ),
    "packed axes": ((UPDATE, HERE, ENDS), PACK, ValueError, "total_tokens"),
}


class OfTensorRT(Enum):
    """Whatever TensorRT's own enums are, their members have these names."""

    PACKED_NHD = 1
    LINEAR = 0


@pytest.mark.parametrize(
    "form",
    [
        *("packed_nhd", "PACKED_NHD", "kPACKED_NHD", OfTensorRT.PACKED_NHD),
        *(AttentionIOForm.PACKED_NHD, AttentionIOForm.kPACKED_NHD),
    ],
)
def test_a_form_has_the_names_of_tensorrt(form):
    cache, expected = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 4)
    kv_cache_update(expected, PACKED, HERE, ENDS, **PACK)
    kv_cache_update(cache, PACKED, HERE, ENDS, update_form=form)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    "mode", ["LINEAR", "kLINEAR", OfTensorRT.LINEAR, KVCacheMode.LINEAR, KVCacheMode.kLINEAR]
)
def test_a_mode_has_the_names_of_tensorrt(mode):
    cache, expected = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 4)
    kv_cache_update(expected, UPDATE, HERE)
    kv_cache_update(cache, UPDATE, HERE, update_form="kPADDED_BHND", cache_mode=mode)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("arguments", "keywords", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_and_nothing_written(arguments, keywords, error, words):
    cache = given_cache()
    before = cache.clone()
    errors = error if isinstance(error, tuple) else (error,)
    for each in errors:
        with pytest.raises(each, match=words):
            kv_cache_update(cache, *arguments, **keywords)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("cache", "error", "words"),
    [
        (torch.zeros(2, 3, 8, 4, dtype=torch.int64), TypeError, "cache"),
        (torch.zeros(2, 3, 32), ValueError, "cache"),
        (torch.zeros(2, 3, 4, 8).transpose(2, 3), ValueError, "contiguous"),
        (torch.zeros(1, 3, 8, 4).expand(2, -1, -1, -1), ValueError, "share memory"),
    ],
    ids=["dtype", "axes", "rows", "shared"],
)
def test_a_cache_that_cannot_be_written_to(cache, error, words):
    with pytest.raises(error, match=words):
        kv_cache_update(cache, UPDATE.to(cache.dtype), HERE)


def test_an_update_out_of_the_cache_itself_is_refused():
    cache = given_cache()
    with pytest.raises(ValueError, match="shares memory"):
        kv_cache_update(cache, cache[:, :, :2], HERE)


def test_nothing_new_is_nothing_done_but_still_checked():
    cache = given_cache()
    before = cache.clone()
    assert kv_cache_update(cache, UPDATE[:, :, :0], torch.tensor([8, 0])) is cache
    assert torch.equal(cache, before)
    with pytest.raises(IndexError):
        kv_cache_update(cache, UPDATE[:, :, :0], torch.tensor([9, 0]))
