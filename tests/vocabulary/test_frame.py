"""The frame binds a block's bytes to its key: nothing that was changed passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect import frame
from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.frame import ALIGNMENT, HEADER_NBYTES, FrameChecksum, FrameHeader
from kvconnect.keys import BlockKey

KEY = BlockKey(bytes(range(32)))
OTHER = BlockKey(bytes(range(1, 33)))
PRINT = b"layout-of-blocks"


def sealed(nbytes: int, key: BlockKey = KEY) -> torch.Tensor:
    data = torch.full((frame.frame_nbytes(nbytes),), 0xEE, dtype=torch.uint8)
    frame.payload(data, nbytes).copy_(torch.arange(nbytes) % 251)
    frame.seal(data, FrameHeader(7, nbytes, PRINT, key))
    return data


@pytest.mark.parametrize("nbytes", [0, 1, 3968, 3969, 4096, 100_000])
def test_sound_frame_tells_what_was_put_into_it(nbytes):
    assert frame.check(sealed(nbytes), KEY, {PRINT}) == FrameHeader(7, nbytes, PRINT, KEY)


@given(st.integers(0, 1 << 40))
def test_frame_length_is_the_next_multiple_that_holds_header_and_payload(nbytes):
    length = frame.frame_nbytes(nbytes)
    assert length % ALIGNMENT == 0
    assert 0 <= length - HEADER_NBYTES - nbytes < ALIGNMENT


def test_padding_is_zero_whatever_was_there():
    data = sealed(10)
    assert not data[HEADER_NBYTES + 10 :].any()


@given(st.integers(0, HEADER_NBYTES + 5000 - 1), st.integers(1, 255))
def test_any_changed_byte_of_header_or_payload_is_found(position, change):
    data = sealed(5000)
    data[position] ^= change
    with pytest.raises(BadFrame):
        frame.check(data, KEY, {PRINT})


def test_addressed_frame_is_not_sound_before_it_is_sealed():
    whole = sealed(5000)
    data = whole.clone()
    checksum = frame.address(data, FrameHeader(7, 5000, PRINT, KEY))
    with pytest.raises(BadFrame, match="checksum"):
        frame.check(data, KEY, {PRINT})
    checksum.seal()
    assert torch.equal(data, whole)


EDGES = st.lists(st.integers(0, 2 * ALIGNMENT), max_size=8)


@given(st.sampled_from([0, 1, 100, 5000]), EDGES)
def test_checksum_taken_piece_by_piece_is_the_same(nbytes, edges):
    data = sealed(nbytes)
    taken = FrameChecksum(data)
    at = 0
    for edge in sorted(min(edge, data.numel()) for edge in edges):
        taken.passed(at, edge)
        at = edge
    assert taken.digest() == FrameChecksum(data).digest()
    assert frame.check(data, KEY, {PRINT}, taken) == frame.check(data, KEY, {PRINT})


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=8))
def test_what_is_told_out_of_order_is_hashed_all_the_same(told):
    data = sealed(5000)
    taken = FrameChecksum(data)
    for start, stop in told:
        taken.passed(start, stop)
    assert taken.digest() == FrameChecksum(data).digest()


@given(st.integers(0, HEADER_NBYTES + 5000 - 1), st.integers(1, 255), EDGES)
def test_what_changed_before_it_passed_is_found(position, change, edges):
    data = sealed(5000)
    taken = FrameChecksum(data)
    data[position] ^= change
    at = 0
    for edge in sorted(edges):
        taken.passed(at, edge)
        at = edge
    with pytest.raises(BadFrame):
        frame.check(data, KEY, {PRINT}, taken)


def test_frame_that_is_written_once_more_is_hashed_once_more():
    data = sealed(5000, OTHER)
    taken = FrameChecksum(data)
    taken.passed(0, 4096)
    data.copy_(sealed(5000))
    taken.passed(0, 1024)
    taken.passed(1024, data.numel())
    assert frame.check(data, KEY, {PRINT}, taken).key == KEY


def test_frame_that_was_hashed_elsewhere_is_hashed_once_more_when_it_is_written_again():
    data, other = sealed(5000), sealed(5000, OTHER)
    taken = FrameChecksum(data)
    taken.hashed(taken.end_of(other.numpy().data), FrameChecksum(other).digest())
    assert taken.left_nbytes == 0
    assert taken.digest() == FrameChecksum(other).digest()
    taken.passed(0, data.numel())
    assert frame.check(data, KEY, {PRINT}, taken).key == KEY


def test_header_alone_is_checked_for_all_but_the_checksum():
    data = sealed(5000)
    data[-1 - ALIGNMENT] ^= 1
    assert frame.check_header(data, KEY, {PRINT}).key == KEY
    with pytest.raises(BadFrame, match="holds block"):
        frame.check_header(data, OTHER, {PRINT})
    with pytest.raises(BadFrame, match="do not fit"):
        frame.check_header(data[:ALIGNMENT], KEY, {PRINT})


@given(st.integers(0, 3 * ALIGNMENT))
def test_frame_of_any_other_length_is_found(length):
    data = sealed(5000)
    if length != data.numel():
        longer = torch.cat([data, torch.zeros(2 * ALIGNMENT, dtype=torch.uint8)])
        with pytest.raises(BadFrame):
            frame.check(longer[:length].clone(), KEY, {PRINT})


def test_whole_frame_of_another_key_layout_or_format_version_is_found(monkeypatch):
    with pytest.raises(BadFrame, match="holds block"):
        frame.check(sealed(100, OTHER), KEY, {PRINT})
    with pytest.raises(BadFrame, match="another layout"):
        frame.check(sealed(100), KEY, {b"x" * 16})
    monkeypatch.setattr(frame, "FORMAT_VERSION", 2)
    data = sealed(100)
    monkeypatch.undo()
    with pytest.raises(BadFrame, match="format version 2"):
        frame.check(data, KEY, {PRINT})


def test_buffer_of_the_wrong_length_is_refused_untouched():
    data = torch.zeros(ALIGNMENT, dtype=torch.uint8)
    with pytest.raises(ConfigurationError, match="8192 are needed"):
        frame.seal(data, FrameHeader(1, 5000, PRINT, KEY))
    assert not data.any()
