"""Loads piece by piece: leading buffers that are filled and sound, and nothing begun in vain."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backends.guard import pieces
from kvconnect.backends.guard.pieces import load_pieces

SIZES = st.lists(st.integers(0, 40), max_size=12)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 32)


def buffers(sizes):
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


@given(SIZES)
def test_pieces_are_all_buffers_in_order_and_no_larger_than_they_must_be(sizes):
    parts = list(pieces.pieces(buffers(sizes)))
    assert [index for part in parts for index in range(part.start, part.stop)] == list(
        range(len(sizes))
    )
    for part in parts:
        assert sum(sizes[part.start : part.stop - 1]) < 32


@given(SIZES, st.integers(0, 14), st.integers(0, 14), st.integers(0, 14))
def test_what_counts_is_filled_and_sound_from_the_first_on(sizes, there, good, patience):
    """`there` buffers can be filled, `good` are sound, nobody waits after `patience` checks."""
    filled, checked = [], []

    async def fill(part):
        filled.append(part)
        return max(0, min(there, part.stop) - part.start)

    async def check(got):
        checked.extend(range(got.start, got.stop))
        return max(0, min(good, got.stop) - got.start)

    def wanted():
        return len(filled) <= patience

    count = asyncio.run(load_pieces(buffers(sizes), fill, check, wanted=wanted))
    begun = [index for part in filled for index in range(part.start, part.stop)]
    assert count == min([there, good, len(begun)])
    assert begun == list(range(len(begun)))
    assert set(checked) <= set(range(min(there, len(begun))))


async def test_an_error_comes_when_the_other_half_has_ended():
    ended = []

    async def fill(part):
        if part.start:
            raise OSError("gone")
        return part.stop - part.start

    async def check(got):
        await asyncio.sleep(0.01)
        ended.append(got)
        return got.stop - got.start

    with pytest.raises(OSError, match="gone"):
        await load_pieces(buffers([32, 32]), fill, check)
    assert ended == [slice(0, 1)]
