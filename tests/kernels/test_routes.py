"""On which stream, in which order and by which way copies run, with a device that writes it down.

Its work runs when something waits for it, in a random order that the waits allow, and sources that
may be read early are read early: what is not ordered becomes wrong bytes.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_copies import HostCopy, Runs, host_copies, with_ids
from fake_driver import FakeDriver, FakeStream
from hypothesis import given
from hypothesis import strategies as st
from shim_runs import FEW

from kvconnect.kernels.blocks.transfer import Transfer
from kvconnect.kernels.cuda.copy_policy import CopyPolicy, Direction
from kvconnect.kernels.cuda.device import DeviceWork, device_work, driven_by
from kvconnect.kernels.cuda.driver.interface import AccessOrder, NoDevice

LOAD, STORE = Direction.LOAD, Direction.STORE
SMALL_SLOTS = CopyPolicy(slot_nbytes=300, num_slots=2)
PAIRS = [(0, 3), (5, 1), (2, 7)]


made_drivers: list[FakeDriver] = []


@pytest.fixture(autouse=True)
def _nothing_is_left_to_run():
    made_drivers.clear()
    yield
    for driver in made_drivers:
        driver.finish()


def work_of(shim=None, *, lazy=True, policy=None, seed=0):
    driver = FakeDriver(shim, lazy=lazy, seed=seed)
    made_drivers.append(driver)
    return driver, DeviceWork(driver, policy or CopyPolicy())


def overwrite_behind(driver, stream, tensors):
    """What the model does next on its stream: it writes over the sources."""

    def run():
        for tensor in tensors:
            tensor.fill_(0xEE)

    driver._give("model", stream, run)


def write_before(driver, stream, tensors):
    """What the model did before: it writes the sources, which are wrong until then."""
    right = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(0xBB)

    def run():
        for tensor, content in zip(tensors, right, strict=True):
            tensor.copy_(content)

    driver._give("model", stream, run)


# ---------------------------------------------------------------------------- bytes and order


def check_route(shim, made, path, *, legacy, seed, policy=None):
    driver, work = work_of(shim, seed=seed, policy=policy)
    made.allow_on(driver)
    expected = made.expected()
    stream = FakeStream("given", legacy=legacy)
    sources = made.planes if made.direction is STORE else [made.host]
    write_before(driver, stream, sources)
    transfer = work.copy(made.copy, stream, path)
    overwrite_behind(driver, stream, sources)
    driver.finish()
    transfer.wait()
    assert made.is_as(expected)
    return driver


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("path", ["kernel", "dma", "staged"])
@FEW
@given(made=host_copies(), seed=st.integers(0, 10_000))
def test_copies_come_behind_what_the_stream_did_and_before_what_it_does(
    shim, path, legacy, made, seed
):
    check_route(shim, made, path, legacy=legacy, seed=seed, policy=SMALL_SLOTS)


@pytest.mark.parametrize("seed", range(20))
def test_a_store_never_reads_early_and_a_load_only_if_the_source_is_stable(seed):
    for direction, stable in ((STORE, False), (STORE, True), (LOAD, False)):
        made = HostCopy(Runs((64, 64)), PAIRS, direction, stable=stable)
        driver = check_route(None, made, "dma", legacy=False, seed=seed)
        assert {batch.order for batch in driver.batches} == {AccessOrder.STREAM}
    made = HostCopy(Runs((64, 64)), PAIRS, LOAD, stable=True)
    driver, work = work_of(seed=seed)
    expected = made.expected()
    work.copy(made.copy, None, "dma").wait()
    assert {batch.order for batch in driver.batches} == {AccessOrder.ANY}
    assert made.is_as(expected)


def test_reading_a_source_early_that_the_stream_still_writes_is_seen_by_these_tests():
    wrong = 0
    for seed in range(20):
        made = HostCopy(Runs((64, 64)), PAIRS, LOAD, stable=True)  # which it is not
        try:
            check_route(None, made, "dma", legacy=False, seed=seed)
        except AssertionError:
            wrong += 1
    assert 0 < wrong < 20


def test_dma_on_the_legacy_default_stream_goes_to_the_copy_streams():
    for direction, kind in ((LOAD, "load"), (STORE, "store")):
        made = HostCopy(Runs((64,)), PAIRS, direction)
        driver = check_route(None, made, "dma", legacy=True, seed=1)
        assert {batch.stream.name for batch in driver.batches} == {kind}


def test_other_streams_keep_their_copies():
    made = HostCopy(Runs((64,)), PAIRS, STORE)
    driver = check_route(None, made, "dma", legacy=False, seed=1)
    assert {batch.stream.name for batch in driver.batches} == {"given"}


def test_without_a_stream_the_current_one_is_taken():
    made = HostCopy(Runs((64,)), PAIRS, STORE)
    driver, work = work_of()
    work.copy(made.copy, None, "dma").wait()
    assert {batch.stream for batch in driver.batches} == {driver.compute}


# ---------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("direction", "run_nbytes", "kinds"),
    [
        (LOAD, 28 << 10, {"batch"}),
        (LOAD, (28 << 10) - 8, {"kernel"}),
        (STORE, 64 << 10, {"batch"}),
        (STORE, (64 << 10) - 8, {"kernel", "batch"}),
    ],
)
def test_the_size_of_a_run_decides(direction, run_nbytes, kinds):
    made = HostCopy(Runs((run_nbytes, run_nbytes)), PAIRS, direction)
    driver, work = work_of()
    work.copy(made.copy, None, "auto")
    assert set(driver.kinds) == kinds


def test_the_size_after_merging_decides():
    together = HostCopy(Runs((16 << 10,)), [(i, i) for i in range(4)], STORE)
    driver, work = work_of()
    work.copy(together.copy, None, "auto")
    assert driver.kinds == ["batch"]
    assert driver.batches[0].descriptors.sizes.tolist() == [64 << 10]


@pytest.mark.parametrize("reverse", [False, True])
def test_small_runs_to_the_host_are_gathered_and_leave_in_one_copy(reverse):
    made = HostCopy(Runs((512, 512, 256), reverse=reverse), [(4, 0), (1, 1), (9, 2)], STORE)
    driver, work = work_of()
    work.copy(made.copy, None, "auto")
    assert [len(batch.descriptors) for batch in driver.batches] == [1]
    assert driver.batches[0].descriptors.nbytes == 3 * 1280


def test_a_kernel_that_reads_host_memory_takes_few_multiprocessors():
    made = HostCopy(Runs((8 << 10,)), [(2 * i, i) for i in range(200)], LOAD)
    driver, work = work_of()
    driver.multiprocessors = 132
    work.copy(made.copy, None, "kernel")
    assert {launched.ctas for launched in driver.launched} == {4}


@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_while_a_graph_is_captured_only_kernels_run(direction):
    made = HostCopy(Runs((1 << 20,)), PAIRS, direction)
    driver, work = work_of()
    graph = FakeStream("graph", capturing=True)
    assert work.copy(made.copy, graph, "auto").done()
    assert driver.kinds == ["kernel"]
    for path in ("dma", "staged"):
        with pytest.raises(RuntimeError, match="graph"):
            work.copy(made.copy, graph, path)
    pageable = HostCopy(Runs((64,)), PAIRS, direction, pinned=False)
    with pytest.raises(RuntimeError, match="pageable"):
        work.copy(pageable.copy, graph, "auto")
    assert driver.kinds == ["kernel"]


def test_ids_on_the_device_are_for_kernels():
    made = HostCopy(Runs((1 << 20,)), PAIRS, LOAD)
    driver, work = work_of()
    driver.everything = True
    ids = torch.tensor([0, 5, 2])
    copy = with_ids(made.copy, made.copy.source.ids, ids)
    driver.everything = False
    driver.on_device = lambda device: device.type == "cuda" or driver.everything
    for path in ("dma", "staged"):
        with pytest.raises(RuntimeError, match="host"):
            work.copy(copy, None, path)
    assert not driver.works
    work.copy(copy, None, "auto")
    assert "batch" not in driver.kinds
    pageable = replace(copy, source=copy.source._replace(pinned=False))
    with pytest.raises(RuntimeError, match="pageable"):
        work.copy(pageable, None, "auto")


def test_copies_within_the_device_are_kernels_and_cannot_be_staged():
    made = HostCopy(Runs((1 << 20,)), PAIRS, LOAD)
    source = made.copy.source._replace(device=made.copy.target.device)
    copy = replace(made.copy, source=source)
    driver, work = work_of()
    work.copy(copy, None, "auto")
    assert driver.kinds == ["kernel"]
    with pytest.raises(RuntimeError, match="staged"):
        work.copy(copy, None, "staged")
    work.copy(copy, None, "dma")
    assert driver.batches[0].order is AccessOrder.STREAM


def test_nothing_to_copy_is_done_at_once():
    made = HostCopy(Runs((64,)), PAIRS, LOAD)
    driver, work = work_of()
    none = np.empty(0, np.int64)
    assert work.copy(with_ids(made.copy, none, none), None, "auto").done()
    assert work.copy(replace(made.copy, nbytes=0), None, "auto").done()
    assert not driver.works


def test_without_cuda_there_is_no_device_for_a_path():
    with pytest.raises(NoDevice, match="cpu"):
        device_work(torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(NoDevice, match=r"libcuda\.so\.1"):
            device_work(torch.device("cuda", 0))


def test_a_driver_put_in_place_takes_all_work_and_leaves_again():
    driver = FakeDriver(everything=True)
    with driven_by(driver) as outer:
        assert device_work(torch.device("cpu")) is outer
        with driven_by(FakeDriver()):
            assert device_work(torch.device("cpu")) is not outer
        assert device_work(torch.device("cpu")) is outer
    with pytest.raises(NoDevice):
        device_work(torch.device("cpu"))


# ---------------------------------------------------------------------------- pageable memory


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("path", ["auto", "dma"])
@FEW
@given(made=host_copies(pinned=False), seed=st.integers(0, 10_000))
def test_pageable_memory_goes_through_page_locked_buffers(path, legacy, made, seed):
    driver, work = work_of(seed=seed, policy=SMALL_SLOTS)
    expected = made.expected()
    stream = FakeStream("given", legacy=legacy)
    on_device = made.planes if made.direction is STORE else []
    write_before(driver, stream, on_device)
    transfer = work.copy(made.copy, stream, path)
    host = range(made.host.data_ptr(), made.host.data_ptr() + made.host.numel())
    for batch in driver.batches:
        ends = (*batch.descriptors.sources.tolist(), *batch.descriptors.targets.tolist())
        assert not any(address in host for address in ends)
    if made.direction is LOAD:
        made.host.fill_(0xEE)  # it has been read
    else:
        assert made.is_as(expected), "it has been written"
    overwrite_behind(driver, stream, on_device)
    driver.finish()
    transfer.wait()
    assert made.is_as(expected)


def test_pageable_memory_and_kernels_do_not_go_together():
    made = HostCopy(Runs((64,)), PAIRS, LOAD, pinned=False)
    _, work = work_of()
    for path in ("kernel", "staged"):
        with pytest.raises(RuntimeError, match="page-locked"):
            work.copy(made.copy, None, path)


# ---------------------------------------------------------------------------- buffers, lifetimes


def test_a_block_larger_than_a_buffer_gets_a_larger_one(shim):
    made = HostCopy(Runs((640, 640)), [(i, 9 - i) for i in range(10)], STORE)
    check_route(shim, made, "staged", legacy=False, seed=3, policy=SMALL_SLOTS)
    other = HostCopy(Runs((5000,)), PAIRS, STORE, pinned=False)
    driver, work = work_of(policy=SMALL_SLOTS)
    expected = other.expected()
    work.copy(other.copy, None, "auto").wait()
    assert other.is_as(expected)
    assert max(batch.descriptors.nbytes for batch in driver.batches) <= 300


class Kept:
    """What a weak reference may watch."""


@pytest.mark.parametrize("path", ["kernel", "dma", "staged"])
def test_memory_is_kept_until_the_copy_is_done_although_nobody_keeps_the_transfer(path):
    made = HostCopy(Runs((64,)), PAIRS, STORE)
    driver, work = work_of()
    kept = Kept()
    watch = weakref.ref(kept)
    work.copy(replace(made.copy, keep=(kept,)), None, path)
    del kept
    gc.collect()
    assert watch() is not None
    driver.finish()
    Transfer(driver.record(driver.compute))  # the next one sweeps
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("legacy", [False, True])
def test_memory_is_kept_for_the_half_of_a_copy_that_was_refused(legacy):
    count = 9000  # two batches
    made = HostCopy(Runs((8,)), [(2 * i, i) for i in range(count)], STORE)
    driver, work = work_of()
    driver.fail_batch = 1
    kept = Kept()
    watch = weakref.ref(kept)
    stream = FakeStream("given", legacy=legacy)
    with pytest.raises(RuntimeError, match="planted"):
        work.copy(replace(made.copy, keep=(kept,)), stream, "dma")
    del kept
    gc.collect()
    assert watch() is not None
    if legacy:
        assert stream.after, "the stream comes behind the half that is on its way"
    driver.finish()
    Transfer(driver.record(driver.compute))
    gc.collect()
    assert watch() is None


def test_a_buffer_is_not_used_again_before_its_last_use_is_over(shim):
    # Two streams take turns with two buffers; each copy is checked on its own.
    for seed in range(10):
        driver, work = work_of(shim, seed=seed, policy=SMALL_SLOTS)
        streams = [FakeStream("one"), FakeStream("two")]
        copies = []
        for number in range(6):
            direction = (LOAD, STORE)[number % 2]
            made = HostCopy(Runs((64, 32)), PAIRS, direction, seed=1000 * number)
            made.allow_on(driver)
            expected = made.expected()
            copies.append((made, expected))
            work.copy(made.copy, streams[number // 2 % 2], "staged")
        driver.finish()
        assert all(made.is_as(expected) for made, expected in copies)
