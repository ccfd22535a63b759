"""What is stored in Redis: heads, metadata, names, parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backend import StoredBlock
from kvconnect.backends.redis.format import (
    HEAD_NBYTES,
    MAX_VALUE_NBYTES,
    PART_NBYTES,
    Head,
    Names,
    child_from,
    entry_from,
    member_of,
    metadata_of,
)
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey

KEY, PARENT = BlockKey(bytes(range(32))), BlockKey(bytes(range(32, 64)))
NAMES = Names(b"kv:")
tokens = st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(
    lambda numbers: np.asarray(numbers, np.int32)
)


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


@given(
    st.none() | st.just(PARENT),
    tokens,
    st.integers(0, 100),
    st.integers(0, 5),
    st.sampled_from([b"", b"n" * 32]),
    st.sampled_from([b"", b"m" * 16]),
)
def test_metadata_comes_back(parent, tokens, priority, group, namespace, model):
    block = StoredBlock(
        KEY, torch.zeros(9, dtype=torch.uint8), parent, tokens, priority, namespace, model, group
    )
    metadata = metadata_of(block)
    head = Head.of(9, len(metadata), b"nonce678")
    entry = entry_from(KEY, head, metadata, 7.0)
    assert (entry.key, entry.nbytes, entry.used_at, entry.parent) == (KEY, 9, 7.0, parent)
    assert (entry.priority, entry.group) == (priority, group)
    assert (entry.namespace, entry.model) == (namespace, model)
    if tokens is None:
        assert entry.tokens is None
    else:
        assert entry.tokens.tolist() == tokens.tolist()
    for end in range(len(metadata)):
        assert entry_from(KEY, head, metadata[:end], 7.0) is None


@given(st.binary(max_size=200))
def test_damaged_metadata_is_no_entry_and_no_crash(metadata):
    head = Head.of(9, len(metadata), b"nonce678")
    entry = entry_from(KEY, head, metadata, 7.0)
    assert entry is None or len(metadata_of_entry(entry)) == len(metadata)


def metadata_of_entry(entry):
    e, data = entry, torch.zeros(9, dtype=torch.uint8)
    return metadata_of(
        StoredBlock(e.key, data, e.parent, e.tokens, e.priority, e.namespace, e.model, e.group)
    )


@given(tokens)
def test_children_come_back(tokens):
    child = child_from(member_of(StoredBlock(KEY, torch.zeros(1), PARENT, tokens)))
    assert child.key == KEY
    assert child.tokens.tolist() == ([] if tokens is None else tokens.tolist())


@pytest.mark.parametrize("member", [b"", KEY[:31], KEY + b"\0", KEY + b"\0\0\0"])
def test_other_members_are_no_children(member):
    assert child_from(member) is None


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
