"""gather, scatter, copy: the CUDA sources, compiled with g++, against plain torch.

Every access is checked for bounds and alignment, all arithmetic by UBSan; sources may only be read,
and everything that is not to be written is poisoned and compared.
"""

from __future__ import annotations

import torch
from caches import POISON, at_offset, random_bytes, shapes
from hypothesis import given
from hypothesis import strategies as st
from shim_runs import driver_of, grids, in_two_lengths

from kvconnect.kernels.copy import copy_blocks, gather_blocks, scatter_blocks
from kvconnect.kernels.cuda import device
from kvconnect.kernels.host import reference


def id_lists(num_blocks, size):
    return st.lists(st.integers(-1, num_blocks - 1), min_size=size, max_size=size)


@st.composite
def gathers(draw):
    shape = draw(shapes())
    size = draw(st.integers(1, 6))
    first = draw(st.integers(0, shape.layers - 1))
    return (
        shape.make(draw(st.integers(0, 9))),
        draw(id_lists(shape.blocks, size)),
        slice(first, draw(st.integers(first + 1, shape.layers))),
        draw(st.sampled_from([0, 16, 8, 4, 1])),
        draw(grids),
    )


@st.composite
def scatters(draw):
    case, ids, layers, shift, ctas = draw(gathers())
    distinct = list(dict.fromkeys(block for block in ids if block >= 0))
    return case, [*distinct, *[-1] * (len(ids) - len(distinct))], layers, shift, ctas


def part_of(kv, layers):
    return kv.layer_views(range(*layers.indices(kv.num_layers)))


def row_nbytes(planes):
    return sum(plane[0].nbytes for plane in planes)


def check_gather(shim, given_case):
    case, ids, layers, shift, ctas = given_case
    planes = part_of(case.kv, layers)
    nbytes = row_nbytes(planes)
    out = at_offset(len(ids) * nbytes, shift).view(len(ids), nbytes)
    expected = torch.full_like(out, POISON)
    reference.gather(planes, ids, expected)
    driver, policy = driver_of(shim, ctas)
    for tensor in case.tensors:
        driver.allow_tensor(tensor, writable=False)
    driver.allow_tensor(out, writable=True)
    with device.driven_by(driver, policy):
        gather_blocks(case.kv, ids, out, layers=layers, path="kernel").wait()
    assert torch.equal(out, expected)
    assert driver.launched or max(ids) < 0


def check_scatter(shim, given_case):
    case, ids, layers, shift, ctas = given_case
    planes = part_of(case.kv, layers)
    nbytes = row_nbytes(planes)
    src = at_offset(len(ids) * nbytes, shift, random_bytes(len(ids) * nbytes, 99))
    src = src.view(len(ids), nbytes)
    before = [memory.clone() for memory in case.tensors]
    driver, policy = driver_of(shim, ctas)
    for tensor in case.tensors:
        driver.allow_tensor(tensor, writable=True)
    driver.allow_tensor(src, writable=False)
    with device.driven_by(driver, policy):
        scatter_blocks(src, case.kv, ids, layers=layers, path="kernel").wait()
    written = [memory.clone() for memory in case.tensors]
    for memory, old in zip(case.tensors, before, strict=True):
        memory.copy_(old)
    reference.scatter(src, planes, ids)
    assert driver.launched or max(ids) < 0
    assert all(map(torch.equal, written, case.tensors)), "also what lies between the blocks"


@in_two_lengths
def test_gather_reads_blocks_of_any_form_and_writes_just_their_rows(shim, profile):
    profile(given(gathers())(lambda case: check_gather(shim, case)))()


@in_two_lengths
def test_scatter_writes_just_the_blocks_and_layers_asked_for(shim, profile):
    profile(given(scatters())(lambda case: check_scatter(shim, case)))()


@st.composite
def mappings(draw):
    shape = draw(shapes(blocks=(3, 8)))
    blocks = draw(st.permutations(range(shape.blocks)))
    count = draw(st.integers(1, shape.blocks // 2))
    pairs = list(zip(blocks[:count], blocks[count : 2 * count], strict=True))
    if draw(st.booleans()):
        pairs.append((-1, -1))
    tokens = st.sampled_from([0, 1, shape.tokens - 1, shape.tokens])
    counts = draw(st.none() | st.lists(tokens, min_size=len(pairs), max_size=len(pairs)))
    other = draw(st.none() | st.just(shape.make(50)))
    return shape.make(draw(st.integers(0, 9))), other, pairs, counts, draw(grids)


def check_copy(shim, given_case):
    case, other, pairs, counts, ctas = given_case
    target = other or case
    before = [memory.clone() for memory in target.tensors]
    driver, policy = driver_of(shim, ctas)
    for memory in case.tensors:
        driver.allow_tensor(memory, writable=other is None)
    for memory in other.tensors if other else ():
        driver.allow_tensor(memory, writable=True)
    with device.driven_by(driver, policy):
        copy_blocks(case.kv, target.kv, pairs, counts, path="kernel").wait()
    written = [memory.clone() for memory in target.tensors]
    for memory, old in zip(target.tensors, before, strict=True):
        memory.copy_(old)
    axis = 0 if case.kv.layout == "NHD" else 1
    reference.copy(case.kv.views, target.kv.views, pairs, counts, token_axis=axis)
    assert all(map(torch.equal, written, target.tensors))


@in_two_lengths
def test_copy_writes_just_the_first_tokens_of_each_target(shim, profile):
    profile(given(mappings())(lambda case: check_copy(shim, case)))()
