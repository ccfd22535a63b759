"""What is bound: every form of a cache, and what is none."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from caches import Shape, forms_of, shapes
from hypothesis import given, settings

from kvconnect.kernels.blocks.moves import Partner, row_table
from kvconnect.kernels.blocks.paged import PagedKv, bound
from kvconnect.kernels.copy import copy_blocks
from kvconnect.layout import KvCacheLayout


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_the_planes_are_where_the_views_say(shape):
    cache = shape.make(0)
    kv = cache.kv
    sizes = (kv.num_layers, kv.num_blocks, kv.tokens, kv.heads, kv.key_dim, kv.value_dim)
    assert sizes == (
        shape.layers,
        shape.blocks,
        shape.tokens,
        shape.heads,
        shape.key_dim,
        shape.value_dim,
    )
    assert (kv.dtype, kv.layout, kv.device.type) == (shape.dtype, shape.layout, "cpu")
    token, head = (1, 2) if shape.layout == "NHD" else (2, 1)
    for found, plane in zip(kv.planes, cache.planes, strict=True):
        assert (found.offset, found.row) == (plane.data_ptr(), plane.shape[3])
        for axis, step in ((0, found.block), (token, found.token), (head, found.head)):
            assert plane.shape[axis] == 1 or step == plane.stride(axis)
    assert kv.block_nbytes == cache.row(0).numel()


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_the_runs_of_a_gather_cover_a_row_once_and_the_block_once(shape):
    cache = shape.make(0)
    kv = cache.kv
    table = row_table(kv, range(kv.num_layers), kv.block_nbytes, gathers=True)
    covered = np.zeros(kv.block_nbytes, int)
    for source, target, _, _, nbytes, first_token, token_nbytes in table.run_list:
        covered[target : target + nbytes] += 1
        assert (first_token, token_nbytes) == (0, nbytes)
        start = source - cache.memory.data_ptr()
        assert torch.equal(
            cache.memory[start : start + nbytes], cache.row(0)[target : target + nbytes]
        )
    assert (covered == 1).all()
    assert table.nbytes == kv.block_nbytes
    assert table.num_runs == len(table.runs)


def own_table(kv, *, by_token):
    return Partner(kv, kv).table(kv, kv, range(kv.num_layers), by_token=by_token)


@pytest.mark.parametrize(
    ("form", "gaps", "runs"),
    [
        ("pool", (0, 0, 0), 1),
        ("flat", (8, 0, 0), 1),
        ("pool", (0, 8, 0), 3),
        ("pool", (0, 0, 8), 6),
        ("interleaved", (0, 0, 0), 3),
        ("interleaved", (0, 8, 0), 6),
        ("stacked", (0, 0, 0), 6),
        ("stacked", (0, 0, 8), 6 * 16),
    ],
)
def test_what_is_contiguous_on_both_sides_is_one_run(form, gaps, runs):
    kv = Shape(form, "NHD", torch.float16, 3, 5, 16, 2, 8, 8, gaps).make(0).kv
    assert row_table(kv, range(3), kv.block_nbytes, gathers=True).num_runs == runs
    assert own_table(kv, by_token=False).num_runs == runs


def test_runs_of_whole_tokens_are_not_merged_beyond_a_plane():
    kv = Shape("pool", "NHD", torch.float16, 3, 5, 16, 2, 8, 8).make(0).kv
    rows = own_table(kv, by_token=True).run_list
    assert [row[4:] for row in rows] == [(16 * 2 * 16, 0, 2 * 16)] * 6
    heads = Shape("stacked", "HND", torch.float16, 1, 5, 16, 2, 8, 8).make(0).kv
    rows = own_table(heads, by_token=True).run_list
    assert [row[4:] for row in rows] == [(16 * 16, 0, 16)] * 4


def test_two_caches_share_blocks_where_every_plane_is_shifted_alike():
    keys, values = torch.zeros(6, 4, 2, 8), torch.zeros(6, 4, 2, 8)
    first = PagedKv.from_layers([(keys[:4], values[:4])])
    alike = PagedKv.from_layers([(keys[2:], values[2:])])
    assert Partner(first, alike).shift == 2
    assert Partner(alike, first).shift == -2
    assert Partner(first, PagedKv.from_layers([(keys[2:], values[1:5])])).shift is None


def test_it_keeps_the_memory_and_dies_with_its_last_user():
    pool = torch.rand(3, 1, 2, 2, 1, 4)
    expected = pool.clone()
    kv = PagedKv.from_pool(pool)
    del pool
    gc.collect()
    assert torch.equal(kv.views[1], expected[:, 0, 1])
    other = PagedKv.from_pool(torch.rand(3, 1, 2, 2, 1, 4))
    copy_blocks(kv, other, [(0, 1)])
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


def test_planes_that_are_bound_already_are_found():
    shape = Shape("pairs", "NHD", torch.float32, 2, 3, 4, 2, 8, 5)
    cache = shape.make(0)
    assert bound(list(cache.kv.views), "NHD", 2) is cache.kv
    again = bound(list(cache.kv.views[:2]), "NHD", 2)
    assert (again.num_layers, again.key_dim, again.value_dim) == (1, 8, 5)


def five(*shape):
    return torch.zeros(shape)


LAYER = five(2, 3, 4, 2, 8)
PAIR = (five(3, 4, 2, 8), five(3, 4, 2, 8))
WRONG_LAYERS = {
    "none": ([], "NHD", ValueError, "none"),
    "layout": ([LAYER], "NDH", ValueError, "did you mean"),
    "no tensor": ([[1, 2]], "NHD", TypeError, "tensor"),
    "four axes": ([five(3, 4, 2, 8)], "NHD", ValueError, "must be"),
    "neither axis": ([five(3, 3, 4, 2, 8)], "NHD", ValueError, "must be"),
    "both axes": ([five(2, 2, 4, 2, 8)], "NHD", ValueError, "pair"),
    "triple": ([(*PAIR, PAIR[0])], "NHD", ValueError, "3 tensors"),
    "pair of five axes": ([(LAYER, LAYER)], "NHD", ValueError, "num_blocks, T"),
    "dtypes": ([LAYER, LAYER.double()], "NHD", TypeError, "float64"),
    "dtypes of a pair": ([(PAIR[0], PAIR[1].half())], "NHD", TypeError, "float16"),
    "blocks": ([LAYER, five(2, 5, 4, 2, 8)], "NHD", ValueError, "differ"),
    "tokens": ([(PAIR[0], five(3, 8, 2, 8))], "NHD", ValueError, "differ"),
    "forms": ([PAIR, (PAIR[0], five(3, 4, 2, 0))], "NHD", ValueError, "alike"),
    "rows": ([LAYER.transpose(3, 4)], "NHD", ValueError, "contiguous"),
    "expanded": ([five(2, 3, 1, 2, 8).expand(-1, -1, 4, -1, -1)], "NHD", ValueError, "share"),
    "no tokens": ([five(2, 3, 0, 2, 8)], "NHD", ValueError, "length 0"),
    "devices": ([LAYER, LAYER.to("meta")], "NHD", RuntimeError, "meta"),
}


@pytest.mark.parametrize(
    ("layers", "layout", "error", "words"), WRONG_LAYERS.values(), ids=WRONG_LAYERS
)
def test_layers_that_are_none(layers, layout, error, words):
    with pytest.raises(error, match=words):
        PagedKv.from_layers(layers, layout=layout)


LAYOUT = KvCacheLayout(2, 2, 8, 8, 4, torch.float32)
WRONG_POOLS = {
    "five axes": (five(3, 2, 2, 4, 8), None, ValueError, "must be"),
    "flat without layout": (five(3, 2, 2, 64), None, ValueError, "layout"),
    "kv axis": (five(3, 2, 3, 4, 2, 8), None, ValueError, "must be"),
    "another layout": (five(3, 2, 2, 63), LAYOUT, ValueError, "layout says"),
    "another dtype": (five(3, 2, 2, 64).half(), LAYOUT, TypeError, "layout says"),
    "no tensor": (np.zeros((3, 2, 2, 64)), LAYOUT, TypeError, "tensor"),
    "no layers": (five(3, 0, 2, 4, 2, 8), None, ValueError, "no layers"),
    "rows": (five(3, 2, 2, 4, 8, 2).transpose(4, 5), None, ValueError, "contiguous"),
}


@pytest.mark.parametrize(
    ("pool", "layout", "error", "words"), WRONG_POOLS.values(), ids=WRONG_POOLS
)
def test_pools_that_are_none(pool, layout, error, words):
    with pytest.raises(error, match=words):
        PagedKv.from_pool(pool, layout)


def test_a_pool_may_come_with_its_axes_and_its_layout():
    pool = torch.rand(3, 2, 2, 4, 2, 8)
    flat = PagedKv.from_pool(pool.flatten(3), LAYOUT)
    for other in (PagedKv.from_pool(pool, LAYOUT), PagedKv.from_pool(pool)):
        assert other.planes == flat.planes


def test_every_even_form_has_the_same_shape():
    kvs = [Shape(form, "NHD", torch.half, 2, 3, 4, 2, 8, 8).make(0).kv for form in forms_of(8, 8)]
    assert len({kv.shape for kv in kvs}) == 1
