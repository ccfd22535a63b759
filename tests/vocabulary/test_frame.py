"""The frame binds a block's bytes to its key: nothing that was changed passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect import frame
from kvconnect.errors import BadFrame, ConfigurationError
from kvconnect.frame import ALIGNMENT, HEADER_NBYTES, FrameHeader
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


@given(st.integers(0, 3 * ALIGNMENT))
def test_frame_of_any_other_length_is_found(length):
    data = sealed(5000)
    if length != data.numel():
        longer = torch.cat([data, torch.zeros(2 * ALIGNMENT, dtype=torch.uint8)])
        with pytest.raises(BadFrame):
            frame.check(longer[:length].clone(), KEY, {PRINT})


def test_whole_frame_of_another_key_is_found():
    with pytest.raises(BadFrame, match="holds block"):
        frame.check(sealed(100, OTHER), KEY, {PRINT})


def test_whole_frame_of_another_layout_is_found():
    with pytest.raises(BadFrame, match="another layout"):
        frame.check(sealed(100), KEY, {b"x" * 16})


def test_frame_of_another_format_version_is_found(monkeypatch):
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
