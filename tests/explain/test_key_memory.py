"""Fingerprints of prefixes, what is remembered of them, and how many are new."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.explain.key_memory import DistinctKeys, Fingerprinter, KeyMemory

T = 4
RNG = np.random.default_rng(5)


def keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2**64, count, np.uint64)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(0, 3)))
def test_prefixes_are_equal_as_far_as_tokens_are(left, right):
    prints = Fingerprinter(T)
    a, has_tail = prints.prefixes(np.array(left, np.int32))
    b, _ = prints.prefixes(np.array(right, np.int32))
    assert has_tail == bool(len(left) % T)
    assert len(a) == -(-len(left) // T)
    for number in range(min(len(a), len(b))):
        same = left[: T * (number + 1)] == right[: T * (number + 1)]
        assert (a[number] == b[number]) == same


def test_the_latest_number_is_remembered():
    memory, some = KeyMemory(1 << 10), keys(5)
    assert memory.find(some).tolist() == [-1] * 5
    memory.add(some[:3], 7)
    memory.add(some[2:4], 9)
    assert memory.find(some).tolist() == [7, 7, 9, 9, -1]
    memory.clear()
    assert memory.find(some).tolist() == [-1] * 5


def test_keys_are_forgotten_at_the_stated_rate():
    slots = 1 << 12
    memory, old = KeyMemory(slots), keys(1000)
    memory.add(old, 1)
    memory.add(keys(slots, 1), 2)
    forgotten = np.mean(memory.find(old) != 1)
    assert forgotten == pytest.approx(1 - math.exp(-1.12), abs=0.06)  # others of `old`, too
    assert np.all(memory.find(keys(20_000, 2)) == -1)


@pytest.mark.parametrize("count", [100, 5_000, 200_000])
def test_new_keys_are_counted_within_the_stated_error(count):
    errors = []
    for seed in range(8):
        sketch, some = DistinctKeys(), keys(count, seed)
        estimate = sum(sketch.add(part) for part in np.array_split(some, 7))
        assert sketch.add(some) == 0.0
        errors.append(estimate / count - 1)
    standard = math.sqrt(np.mean(np.square(errors)))
    assert standard < 0.013 * 2
