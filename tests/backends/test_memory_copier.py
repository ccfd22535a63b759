"""Copies of the memory store: byte for byte, and over only when all of them are."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_fused_copy import made as fused_made

from kvconnect import frame
from kvconnect.backends.host import copier as memory_copier
from kvconnect.backends.host.copier import Copy
from kvconnect.backends.lanes import Lane
from kvconnect.errors import BadFrame
from kvconnect.frame import FrameChecksum, FrameHeader, frame_nbytes
from kvconnect.keys import BlockKey

MIB = 1 << 20


@pytest.fixture(params=["piece by piece", "fused"], autouse=True)
def way(request, monkeypatch):
    """How copies are done."""
    made = fused_made() if request.param == "fused" else None
    assert (made is not None) == (request.param == "fused")
    monkeypatch.setattr(memory_copier, "fused_copy", lambda: made)
    return request.param


@pytest.fixture
def copy_all(way):
    lane = Lane("copies", 2)
    yield partial(memory_copier.copy_all, lane=lane)
    lane.end()
    lane.join()


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [MIB],
        [MIB + 1],
        [3 * MIB + 7],
        [1, 2 * MIB],
        [2 * MIB, 1],
        [MIB] * 4,
        [MIB] * 5,
    ],
)
async def test_every_byte_is_copied_and_no_other(copy_all, sizes):
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    targets = [np.full(size + 2, 0xC5, np.uint8) for size in sizes]
    await copy_all([Copy([(s, t[1:-1])]) for s, t in zip(sources, targets, strict=True)])
    for source, target in zip(sources, targets, strict=True):
        assert np.array_equal(source, target[1:-1])
        assert (target[0], target[-1]) == (0xC5, 0xC5)


# Uneven parts, as of a value whose units are not neighbours, and one longer than a piece.
CUTS = [[], [4096], [65536, 131072], [3 * MIB // 2]]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("count", [1, 3])
async def test_values_are_sealed_as_they_are_read_and_hashed_as_they_arrive(copy_all, cuts, count):
    payload = 2 * MIB - 200
    frames = [framed(payload, number) for number in range(count)]
    kept = [np.zeros(frame_nbytes(payload), np.uint8) for _ in frames]
    sealing = [frame.address(data, header) for data, header in frames]
    assert not any(is_sound(data, header) for data, header in frames)
    await copy_all(
        [
            Copy(cut(data.numpy(), target, cuts), checksum, seals=True)
            for (data, _), target, checksum in zip(frames, kept, sealing, strict=True)
        ]
    )
    into = [torch.full_like(data, 0xEE) for data, _ in frames]
    taken = [FrameChecksum(data) for data in into]
    await copy_all(
        [
            Copy(cut(source, data.numpy(), cuts), checksum)
            for source, data, checksum in zip(kept, into, taken, strict=True)
        ]
    )
    for (data, header), source, loaded, checksum in zip(frames, kept, into, taken, strict=True):
        assert np.array_equal(data.numpy(), source)
        assert checksum.left_nbytes == 0
        assert frame.check(loaded, header.key, None, checksum) == header
        assert is_sound(loaded, header)


def framed(payload, number):
    data = torch.from_numpy(
        np.random.default_rng(number).integers(0, 256, frame_nbytes(payload), np.uint8)
    )
    return data, FrameHeader(3, payload, bytes(16), BlockKey(bytes([number] * 32)))


def cut(source, target, cuts):
    edges = [0, *cuts, source.nbytes]
    return [(source[a:b], target[a:b]) for a, b in pairwise(edges)]


def is_sound(data, header):
    try:
        return frame.check(data, header.key, None) == header
    except BadFrame:
        return False


async def test_memory_with_gaps_is_copied_as_it_is(copy_all):
    data, _ = framed(2 * MIB - 128, 0)
    source = np.repeat(data.numpy(), 2)[::2]
    into = [torch.zeros_like(data) for _ in range(2)]
    copies = [Copy([(source, one.numpy())], FrameChecksum(one)) for one in into]
    assert copies[0].fusable is None
    await copy_all(copies)
    assert all(torch.equal(one, data) for one in into)


# What a store may hold under a key: no header, a header that says more or less than there is.
@pytest.mark.parametrize("length", [0, 100, 128, 4095, 4096, 2 * MIB - 4096])
@pytest.mark.parametrize("says", [0, MIB, 2 * MIB - 128, 1 << 63])
async def test_a_value_that_is_no_sound_frame_is_none_afterwards(copy_all, length, says):
    value = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    data, header = framed(2 * MIB - 128, 0)
    frame.seal(data, header)
    whole = data.numpy()
    value[:length] = whole[:length]
    value[16:24][: max(0, length - 16)] = np.frombuffer(says.to_bytes(8, "little"), np.uint8)[
        : max(0, length - 16)
    ]
    into = torch.full((2 * MIB,), 0xEE, dtype=torch.uint8)
    taken = FrameChecksum(into)
    other = torch.full((2 * MIB,), 0xEE, dtype=torch.uint8)  # so that the call has two halves
    await copy_all(
        [
            Copy([(value, into.numpy()[:length])] if length else [], taken),
            Copy([(whole, other.numpy())], FrameChecksum(other)),
        ]
    )
    assert np.array_equal(into.numpy()[:length], value)
    assert (into.numpy()[length:] == 0xEE).all()
    with pytest.raises(BadFrame):
        frame.check(into, header.key, None, taken)


async def test_error_of_a_half_is_the_call_s(copy_all):
    longer = np.empty(2 * MIB, np.uint8)
    with pytest.raises(ValueError, match=r"broadcast|cannot be copied"):
        await copy_all([Copy([(np.empty(2 * MIB - 1, np.uint8), longer)])])


async def test_threads_that_run_out_later_harm_no_copy(copy_all, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    source = np.ones(4 * MIB, np.uint8)
    target = np.zeros_like(source)
    await copy_all([Copy([(source, target)])])
    assert target.all()
