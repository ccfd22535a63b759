"""What is stored in Redis: heads, names, parts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backends.redis.format import HEAD_NBYTES, MAX_VALUE_NBYTES, PART_NBYTES, Head, Names
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey

KEY, PARENT = BlockKey(bytes(range(32))), BlockKey(bytes(range(32, 64)))
NAMES = Names(b"kv:")


@given(frame=st.integers(0, 64 << 20), metadata=st.integers(0, 4096))
def test_no_value_is_above_the_limit_and_parts_cover_the_frame(frame, metadata):
    head = Head.of(frame, metadata, b"nonce678")
    parts = [head.part(number) for number in range(head.num_parts)]
    assert head.value_nbytes <= MAX_VALUE_NBYTES
    assert all(part.stop - part.start <= PART_NBYTES for part in parts[1:])
    edges = [0, *(part.stop for part in parts)]
    assert [part.start for part in parts] == edges[:-1]
    assert edges[-1] == frame
    assert len(NAMES.parts(KEY, head)) == head.num_parts - 1
    assert Head.parse(head.pack() + b"more") == head


@given(st.binary(max_size=80))
def test_other_bytes_are_no_head(data):
    assert Head.parse(data) is None


@pytest.mark.parametrize("at", range(4))
def test_other_magic_is_no_head(at):
    packed = bytearray(Head.of(100, 0, b"nonce678").pack())
    packed[at] ^= 1
    assert Head.parse(packed) is None


@pytest.mark.parametrize(
    ("metadata", "frame", "part"),
    [
        (0, 10, 11),
        (0, 1 << 60, 1),
        (0, 1 << 60, 0),
        (2 << 20, 10, 10),
        (0, 10, PART_NBYTES),
        (0, (5 << 20) | 1 << 44, PART_NBYTES),  # a flipped bit, and it has eight million parts
    ],
)
def test_head_whose_numbers_cannot_be_is_none(metadata, frame, part):
    assert Head.parse(Head(metadata, frame, part, b"nonce678", 1.0).pack()) is None


@pytest.mark.parametrize("created_at", [math.inf, -math.inf, math.nan])
def test_head_of_no_time_is_none(created_at):
    assert Head.parse(Head(0, 10, 10, b"nonce678", created_at).pack()) is None


def test_frame_that_is_too_long_to_be_read_again_is_not_stored():
    most = Head.of(4 << 30, 0, b"nonce678")
    assert Head.parse(most.pack()) == most
    with pytest.raises(ConfigurationError, match="tokens_per_block"):
        Head.of((4 << 30) + 1, 0, b"nonce678")


def test_names_tell_their_key_and_only_they():
    assert NAMES.key(NAMES.block(KEY)) == KEY
    head = Head.of(MAX_VALUE_NBYTES, 0, b"nonce678")
    others = [*NAMES.parts(KEY, head), NAMES.children(KEY), NAMES.children(None)]
    assert [NAMES.key(name) for name in others] == [None] * len(others)
    assert NAMES.key(b"other" + NAMES.block(KEY)) is None
    assert NAMES.key(b"kv:b:" + b"z" * 64) is None


def test_parts_of_two_writings_of_one_block_have_different_names():
    one, other = (Head.of(MAX_VALUE_NBYTES, 0, nonce) for nonce in (b"nonce678", b"nonce679"))
    assert not set(NAMES.parts(KEY, one)) & set(NAMES.parts(KEY, other))


def test_head_is_as_long_as_it_says():
    assert len(Head.of(1, 0, b"nonce678").pack()) == HEAD_NBYTES
