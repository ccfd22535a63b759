"""Copies as descriptors: all bytes, none twice, merged, in batches, in portions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from device_copies import HostCopy, Runs, host_copies, with_ids
from fake_driver import FakeDriver, FakeStream, rows_of
from hypothesis import given
from hypothesis import strategies as st
from shim_runs import FEW

from kvconnect.kernels.cuda.copy_policy import Direction
from kvconnect.kernels.cuda.dma import cut, describe, submit
from kvconnect.kernels.cuda.driver.interface import MAX_BATCH, AccessOrder, Descriptors


def bytes_of(descriptors):
    """Where each target byte comes from."""
    return {
        target + i: source + i for source, target, size in rows_of(descriptors) for i in range(size)
    }


@FEW
@given(host_copies())
def test_descriptors_move_just_the_bytes_of_the_copy(made):
    driver = FakeDriver()
    expected = made.expected()
    runs = describe(made.copy)
    if len(runs):
        submit(driver, runs, AccessOrder.STREAM, driver.compute)
    assert made.is_as(expected)
    assert len(bytes_of(runs)) == runs.nbytes, "no byte is written twice"


@FEW
@given(host_copies())
def test_no_two_descriptors_could_be_one(made):
    rows = sorted(rows_of(describe(made.copy)), key=lambda row: row[1])
    for (source, target, size), after in itertools.pairwise(rows):
        assert not (source + size == after[0] and target + size == after[1])


def test_blocks_that_follow_each_other_on_both_sides_are_one_descriptor():
    made = HostCopy(Runs((64,)), [(3, 5), (2, 4), (4, 6), (9, 8)], Direction.STORE)
    runs = describe(made.copy)
    assert sorted(runs.sizes.tolist()) == [64, 3 * 64]


def test_a_batch_has_at_most_8192_copies_and_none_is_lost():
    count = 2 * MAX_BATCH + 5
    ids = np.arange(count, dtype=np.int64)
    made = HostCopy(Runs((8,)), [(0, 0)], Direction.STORE)
    # Every second run's length of the source: nothing can be merged.
    rows = Descriptors(ids * 16, ids * 8, np.full(count, 8, np.int64))
    driver = FakeDriver(lazy=True)
    stream = FakeStream("side")
    submit(driver, rows, AccessOrder.STREAM, stream)
    assert [len(batch.descriptors) for batch in driver.batches] == [MAX_BATCH, MAX_BATCH, 5]
    seen = [row for batch in driver.batches for row in rows_of(batch.descriptors)]
    assert seen == rows_of(rows)
    assert all(batch.stream is stream for batch in driver.batches)
    assert made.copy.table.nbytes == 8


@FEW
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.integers(1, 40),
)
def test_portions_hold_all_bytes_and_are_no_larger_than_asked_for(sizes, max_nbytes):
    numbers = np.array(sizes, np.int64)
    starts = np.cumsum(numbers) - numbers
    rows = Descriptors(1000 + 3 * starts, 9000 + starts, numbers)
    portions = list(cut(rows, max_nbytes))
    assert all(0 < portion.nbytes <= max_nbytes for portion in portions)
    joined = {}
    for portion in portions:
        joined |= bytes_of(portion)
    assert joined == bytes_of(rows)
    assert sum(portion.nbytes for portion in portions) == rows.nbytes


def test_offsets_beyond_32_bits_are_described():
    made = HostCopy(Runs((64,)), [(0, 0)], Direction.STORE)
    ids = np.array([1 << 33, (1 << 33) + 2], np.int64)
    runs = describe(with_ids(made.copy, ids, ids))
    assert runs.sources.tolist() == [made.copy.source.address + i * 64 for i in ids.tolist()]


@pytest.mark.parametrize("tokens", [[0, 0], [0, 3]])
def test_what_has_no_bytes_has_no_descriptor(tokens):
    made = HostCopy(Runs((64,), 8), [(1, 1), (3, 3)], Direction.STORE, tokens=tokens)
    assert describe(made.copy).sizes.tolist() == [8 * n for n in tokens if n]
