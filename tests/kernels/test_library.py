"""The ops under torch's compiler, in exported programs, and under torch's own checks of them."""

from __future__ import annotations

import shutil

import pytest
import torch
from caches import Shape
from torch import nn

from kvconnect.kernels.copy import copy_blocks, gather_blocks, scatter_blocks
from kvconnect.kernels.update import kv_cache_update, reshape_and_cache

# What torch says of its own parts.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{name}")
    for name in ("DeprecationWarning", "FutureWarning")
]

SHAPE = Shape("pool", "NHD", torch.float32, 2, 5, 4, 2, 8, 8)
UNEVEN = Shape("pairs", "HND", torch.float32, 2, 5, 4, 2, 8, 5)
OPS = torch.ops.kvconnect

# What is dispatched to, and whether shapes may be symbolic; there is no gradient to check.
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def samples():
    """Arguments for each op, made anew."""
    cache, planes = torch.rand(2, 3, 8, 4), list(SHAPE.make(1).kv.views)
    others, ids = list(SHAPE.make(2).kv.views), torch.tensor([3, 1])
    out = torch.zeros(2, SHAPE.make(1).kv.block_nbytes, dtype=torch.uint8)
    states, starts = torch.rand(2, 2, 8), torch.tensor([1, 2])
    return {
        "kv_cache_update": (cache, torch.rand(2, 3, 2, 4), starts, None),
        "kv_cache_update packed": (cache, torch.rand(5, 3, 4), starts, torch.tensor([0, 2, 5])),
        "reshape_and_cache": (states, states, planes[:2], ids, "NHD"),
        "gather_blocks": (planes, ids, out, "NHD", 2),
        "scatter_blocks": (out, planes, ids, "NHD", 2),
        "copy_blocks": (planes, others, torch.tensor([[0, 1]]), torch.tensor([2]), "NHD", 2),
        "move_blocks": (planes, torch.tensor([[0, 1]]), None, "NHD", 2),
    }


@pytest.mark.parametrize("name", samples())
def test_the_op_is_what_its_schema_says(name):
    op = getattr(OPS, name.split()[0]).default
    torch.library.opcheck(op, samples()[name], test_utils=CHECKS)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_kv_cache_update_in_one_graph_with_dynamic_shapes():
    def step(cache, update, starts):
        new = kv_cache_update(cache, update * 2, starts)
        return new.sum(), new[:, :, :2] + 1

    graph = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, new in ((2, 3), (4, 1), (3, 2)):
        cache, update = torch.rand(batch, 3, 8, 4), torch.rand(batch, 3, new, 4)
        starts, expected = torch.arange(batch), cache.clone()
        wanted = step(expected, update, starts)
        found = graph(cache, update, starts)
        assert torch.equal(cache, expected)
        assert all(map(torch.equal, wanted, found))


def test_packed_updates_in_one_graph():
    def step(cache, update, starts, ends):
        return kv_cache_update(cache, update, starts, ends, update_form="packed_nhd") + 1

    cache, update = torch.rand(2, 3, 8, 4), torch.rand(5, 3, 4)
    starts, ends, expected = torch.tensor([3, 1]), torch.tensor([0, 2, 5]), cache.clone()
    wanted = step(expected, update, starts, ends)
    assert torch.equal(compiled(step)(cache, update, starts, ends), wanted)
    assert torch.equal(cache, expected)


def test_an_index_that_does_not_fit_is_found_when_the_graph_runs():
    cache = torch.zeros(2, 3, 8, 4)
    graph = compiled(lambda starts: kv_cache_update(cache, torch.rand(2, 3, 2, 4), starts) + 0)
    graph(torch.tensor([6, 0]))
    before = cache.clone()
    with pytest.raises(IndexError, match="write_indices"):
        graph(torch.tensor([7, 0]))
    assert torch.equal(cache, before)


def test_shapes_that_do_not_fit_are_found_while_tracing():
    graph = compiled(lambda cache, update: kv_cache_update(cache, update, torch.tensor([0])) + 0)
    with pytest.raises(Exception, match=r"update: \(1, 3, 2, 5\)"):
        graph(torch.zeros(1, 3, 8, 4), torch.zeros(1, 3, 2, 5))


class Layer(nn.Module):
    """A cache that is part of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 3, 8, 4))

    def forward(self, update, starts):
        return kv_cache_update(self.cache, update, starts).sum(2)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_updates_its_cache(strict):
    update, starts = torch.rand(2, 3, 2, 4), torch.tensor([1, 5])
    program = torch.export.export(Layer(), (update, starts), strict=strict)
    assert "kvconnect.kv_cache_update" in str(program.graph)
    module, eager = program.module(), Layer()
    for shift in (0, 1):
        assert torch.equal(module(update, starts + shift), eager(update, starts + shift))
    assert torch.equal(module.cache, eager.cache)
    lowered = program.run_decompositions().module()
    lowered.cache.zero_()
    assert torch.equal(lowered(update, starts), Layer()(update, starts))


def everything(kv, other, out, states, ids, pairs):
    """Every op on bound caches, one after the other."""
    gather_blocks(kv, ids, out)
    scatter_blocks(out, other, ids + 2)
    copy_blocks(kv, other, pairs)
    copy_blocks(kv, kv, pairs, torch.tensor([3]))
    reshape_and_cache(*states, kv, ids * 4 + 3, layer=1)
    gather_blocks(kv, ids, out[:, : out.shape[1] // 2], layers=slice(1, 2))
    return out.sum()


@pytest.mark.parametrize("shape", [SHAPE, UNEVEN], ids=["pool", "uneven"])
def test_every_op_on_a_bound_cache_in_one_graph(shape):
    def arguments():
        kv, other = shape.make(1).kv, shape.make(2).kv
        for view in (*kv.views, *other.views):
            view.fill_(0.25)
            view[1:3].mul_(3)
        nbytes = kv.block_nbytes
        out = torch.zeros(2, nbytes, dtype=torch.uint8)
        ids, pairs = torch.tensor([0, 1]), torch.tensor([[0, 4]])
        states = torch.rand(2, 2, shape.key_dim), torch.rand(2, 2, shape.value_dim)
        return kv, other, out, states, ids, pairs

    torch.manual_seed(0)
    eager = arguments()
    wanted = everything(*eager)
    torch.manual_seed(0)
    traced = arguments()
    assert torch.equal(compiled(everything)(*traced), wanted)
    for kv in (0, 1):
        for new, old in zip(traced[kv].views, eager[kv].views, strict=True):
            assert torch.equal(new, old)
    assert torch.equal(traced[2], eager[2])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_with_the_default_compiler():
    def step(cache, update, starts):
        return kv_cache_update(cache, update.sin(), starts) * 2

    cache, update, starts = torch.rand(2, 3, 8, 4), torch.rand(2, 3, 2, 4), torch.tensor([1, 4])
    expected = cache.clone()
    wanted = step(expected, update, starts)
    assert torch.allclose(torch.compile(step, fullgraph=True)(cache, update, starts), wanted)
    assert torch.allclose(cache, expected)
