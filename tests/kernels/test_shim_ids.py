"""Ids: by value, uploaded, on the device; many of them, invalid ones, several launches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import POISON, random_bytes
from device_copies import with_ids
from fake_driver import FakeStream
from shim_runs import driver_of, widths

from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import Side, Strip
from kvconnect.kernels.blocks.work import BlockCopy, End
from kvconnect.kernels.copy import gather_blocks
from kvconnect.kernels.cuda import device
from kvconnect.kernels.cuda.launch.launcher import Grid, Launcher
from kvconnect.kernels.cuda.launch.runs import INLINE_PAIRS, launch_copy

NBYTES = 96  # of a block


def rows(count, seed=1):
    return random_bytes(count * NBYTES, seed).view(count, NBYTES)


def copy_of(source, target, source_ids, target_ids, num_tokens=None):
    strip = Strip(Side(0, 0, NBYTES), Side(0, 0, NBYTES), 1, NBYTES, NBYTES // 4)
    return BlockCopy(
        table=RunTable([strip]),
        source=End(source.data_ptr(), source_ids, len(source), torch.device("cpu"), pinned=False),
        target=End(target.data_ptr(), target_ids, len(target), torch.device("cpu"), pinned=False),
        num_tokens=num_tokens,
        nbytes=1,
        stable_source=False,
        keep=(source, target),
    )


def submit(copy):
    return device.device_work(copy.source.device).copy(copy, None, "kernel")


def poisoned(count):
    return torch.full((count, NBYTES), POISON, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ctas", [1, 3, 1000])
def test_ids_on_the_device_that_are_no_blocks_are_skipped_and_counted(shim, dtype, ctas):
    source, target = rows(8), poisoned(6)
    ids = torch.tensor([3, -1, 8, 0, -2, 7], dtype=dtype)  # two of them are no blocks
    driver, policy = driver_of(shim, ctas, reads=[source, ids], writes=[target])
    with device.driven_by(driver, policy):
        copy = copy_of(source, target, ids, np.arange(6, dtype=np.int64))
        submit(copy).wait()
        assert device.id_errors(torch.device("cpu")) == 2
        assert device.id_errors(torch.device("cpu")) == 0, "read and reset"
    expected = poisoned(6)
    expected[[0, 3, 5]] = source[[3, 0, 7]]
    assert torch.equal(target, expected)


def test_a_target_id_on_the_device_never_touches_another_block(shim):
    source, target = rows(4), poisoned(5)
    ids = torch.tensor([5, 2**62, -(2**63), 4])
    driver, policy = driver_of(shim, 2, reads=[source, ids], writes=[target])
    with device.driven_by(driver, policy):
        copy = copy_of(source, target, np.arange(4, dtype=np.int64), ids)
        submit(copy).wait()
    expected = poisoned(5)
    expected[4] = source[3]
    assert torch.equal(target, expected)
    assert driver.take_errors() == 3


@pytest.mark.parametrize("some_tokens", [False, True])
@pytest.mark.parametrize("count", [INLINE_PAIRS - 1, INLINE_PAIRS, INLINE_PAIRS + 1, 700])
@pytest.mark.parametrize("capturing", [False, True])
def test_any_number_of_ids_is_copied_in_and_outside_of_graphs(shim, count, some_tokens, capturing):
    source, target = rows(count), poisoned(count)
    source_ids = np.random.default_rng(0).permutation(count)
    target_ids = np.random.default_rng(1).permutation(count)
    tokens = np.arange(count) % 5 if some_tokens else None
    driver, _ = driver_of(shim, 2, reads=[source], writes=[target])
    copy = copy_of(source, target, source_ids, target_ids, tokens)
    # The order of a graph is that of its capture; the shim runs what is launched at once.
    stream = FakeStream("graph", capturing=capturing)
    launcher = Launcher(driver)
    launch_copy(launcher, copy, Grid(stream, 2))
    for launched in driver.launched if capturing else ():
        shim.launch(launched.kernel, launched.ctas, launched.params, driver.regions)
    expected = poisoned(count)
    for i, (old, new) in enumerate(zip(source_ids, target_ids, strict=True)):
        stop = NBYTES if tokens is None else NBYTES // 4 * int(tokens[i])
        expected[new, :stop] = source[old, :stop]
    assert torch.equal(target, expected)
    uploads = driver.kinds.count("upload")
    assert uploads == (0 if capturing or count <= INLINE_PAIRS else 2 + some_tokens)


@pytest.mark.parametrize("max_vectors", [1, 7, 64, 1000])
def test_more_rows_than_a_launch_takes_are_several_launches(shim, max_vectors):
    source, target = rows(40), poisoned(40)
    ids = np.arange(40, dtype=np.int64)
    driver, _ = driver_of(shim, 2, reads=[source], writes=[target])
    launcher = Launcher(driver, max_vectors=max_vectors)
    launch_copy(launcher, copy_of(source, target, ids, ids[::-1].copy()), Grid(driver.compute, 2))
    assert torch.equal(target, source.flip(0))
    per_launch = max(1, max_vectors // (NBYTES // 16))
    assert len(driver.launched) == -(-40 // per_launch)


def test_aligned_memory_is_moved_in_16_bytes_only(shim):
    pool = random_bytes(4 * 2 * 2 * 16 * 2 * 8 * 2).view(torch.bfloat16).view(4, 2, 2, 16, 2, 8)
    kv = PagedKv.from_pool(pool)
    out = torch.empty(3, kv.block_nbytes, dtype=torch.uint8)
    driver, policy = driver_of(shim, 2, reads=[pool], writes=[out])
    with device.driven_by(driver, policy):
        gather_blocks(kv, [2, 0, 3], out, path="kernel")
    assert widths(driver) == {16: out.numel() // 16}


@pytest.mark.parametrize(("shift", "width"), [(16, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
@pytest.mark.parametrize("moved", ["source", "target"])
def test_misaligned_bases_are_moved_in_what_they_allow(shim, shift, width, moved):
    memory = torch.zeros(64 + 4 * NBYTES, dtype=torch.uint8)
    base = -memory.data_ptr() % 16
    other = memory[base + shift : base + shift + 3 * NBYTES].view(3, NBYTES)
    plain = rows(3)
    source, target = (other, plain) if moved == "source" else (plain, other)
    driver, policy = driver_of(shim, 2, reads=[source], writes=[target])
    ids = np.arange(3, dtype=np.int64)
    with device.driven_by(driver, policy):
        submit(copy_of(source, target, ids, ids))
    assert set(widths(driver)) == {width}
    assert torch.equal(source, target)


def test_a_table_is_uploaded_once(shim):
    source, target = rows(4), poisoned(4)
    ids = np.arange(4, dtype=np.int64)
    driver, policy = driver_of(shim, 2, reads=[source], writes=[target])
    copy = copy_of(source, target, ids, ids)
    with device.driven_by(driver, policy):
        submit(copy)
        addresses = {copy.table.kept[driver][0].runs.address}
        submit(with_ids(copy, ids[::-1].copy(), ids))
        addresses.add(copy.table.kept[driver][0].runs.address)
    assert len(addresses) == 1
