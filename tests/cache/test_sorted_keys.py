"""Keys in order, in chunks, against a sorted list."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.tree import sorted_keys
from kvconnect.cache.tree.segment import Children
from kvconnect.cache.tree.sorted_keys import SortedKeys

KEYS = st.binary(min_size=1, max_size=3).map(lambda key: bytes(byte % 4 for byte in key))


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_keys, "_CHUNK", 2)
        yield


def filled(keys, added, removed):
    order = SortedKeys(keys)
    for key in added:
        order.add(key)
    for key in removed:
        order.remove(key)
    return order, sorted({*keys, *added} - set(removed))


@st.composite
def orders(draw):
    keys = draw(st.lists(KEYS, unique=True, max_size=40))
    removed = draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
    first = draw(st.integers(0, len(keys)))
    return filled(keys[:first], keys[first:], removed)


@given(orders())
def test_keys_come_in_order(made):
    order, expected = made
    assert list(order) == expected


@given(orders(), KEYS, KEYS)
def test_the_neighbours_of_a_range_are_the_last_before_it_and_the_first_after_it(made, low, high):
    order, expected = made
    low, high = min(low, high), max(low, high)
    before = max((key for key in expected if key < low), default=b"")
    after = min((key for key in expected if key >= high), default=b"")
    assert order.beside(low, high) == (before, after)


@given(orders(), KEYS)
def test_keys_that_begin_alike_are_found_together(made, prefix):
    order, expected = made
    assert list(order.begun_by(prefix)) == [key for key in expected if key.startswith(prefix)]


def test_a_parent_without_children_has_no_neighbours():
    none = Children()
    assert none.beside(b"a", b"b") == (b"", b"")
    assert list(none.begun_by(b"")) == []


def test_a_child_can_be_replaced_without_another_place_in_the_order():
    made = Children()
    for key, name in zip([b"b", b"a", b"c"], itertools.count()):
        made.add(key, name)
    assert list(made.begun_by(b"")) == [1, 0, 2]
    made[b"a"] = "new"
    made.remove(b"c")
    assert list(made.begun_by(b"")) == ["new", 0]
