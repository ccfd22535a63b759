"""What stores write of a block beside its bytes: the same bytes as ever, and back again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.backend import Child, StoredBlock
from kvconnect.backends.entries import (
    BlockMetadata,
    child_from_bytes,
    child_from_json,
    child_to_bytes,
    child_to_json,
)
from kvconnect.backends.s3.format import Record, unpack
from kvconnect.keys import BlockKey

KEY, PARENT = BlockKey(bytes(range(32))), BlockKey(bytes(range(32, 64)))
DATA = torch.zeros(9, dtype=torch.uint8)
BARE = StoredBlock(KEY, DATA)
WHOLE = StoredBlock(
    KEY,
    DATA,
    PARENT,
    np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32),
    priority=71,
    namespace=b"space",
    model=b"model!",
    group=3,
)
CHILD = Child(KEY, WHOLE.tokens)
TOKENS, TOKENS_TEXT = "0000000001000000ffffffffffffff7f00000080", "AAAAAAEAAAD/////////fwAAAIA="
KEY_HEX, PARENT_HEX = KEY.hex(), PARENT.hex()
tokens = st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(
    lambda numbers: np.asarray(numbers, np.int32)
)


@pytest.mark.parametrize(
    ("block", "metadata"),
    [
        (BARE, "2300000000000000000000000000"),
        (
            WHOLE,
            f"4703000000010500060006000000{PARENT_HEX}{b'space'.hex()}{b'model!'.hex()}{TOKENS}",
        ),
        (
            replace(BARE, parent=PARENT, expires_at=1.5),
            f"2300000000030000000000000000{PARENT_HEX}000000000000f83f",
        ),
    ],
    ids=["bare", "whole", "ending"],
)
def test_redis_writes_these_bytes(block, metadata):
    assert BlockMetadata.of(block).to_bytes().hex() == metadata


def test_children_are_these_bytes():
    assert child_to_bytes(CHILD).hex() == KEY_HEX + TOKENS
    assert child_to_json(CHILD) == {"key": KEY_HEX, "tokens": TOKENS_TEXT}


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        (BARE, {"priority": 35}),
        (
            WHOLE,
            {
                "priority": 71,
                "parent": PARENT_HEX,
                "tokens": TOKENS_TEXT,
                "namespace": b"space".hex(),
                "model": b"model!".hex(),
                "group": 3,
            },
        ),
        (replace(BARE, expires_at=1.5), {"priority": 35, "expires": 1.5}),
    ],
    ids=["bare", "whole", "ending"],
)
def test_s3_writes_these_bytes(block, fields):
    listed = {"key": KEY_HEX, "offset": 0, "nbytes": 9, **fields}
    content = {"at": 7.5, "payload": "a1", "blocks": [listed]}
    encoded = Record.of([block], 7.5, "a1").encode()
    assert encoded[20:] == json.dumps(content, separators=(",", ":")).encode()  # in this order
    assert unpack(encoded) == content


@given(
    st.none() | st.just(PARENT),
    tokens,
    st.integers(0, 100),
    st.integers(0, 5),
    st.sampled_from([b"", b"n" * 32]),
    st.sampled_from([b"", b"m" * 16]),
    st.none() | st.floats(0, 1e12),
)
def test_metadata_comes_back(parent, tokens, priority, group, namespace, model, end):
    known = BlockMetadata(parent, tokens, priority, namespace, model, group, end)
    data = known.to_bytes()
    for back in (BlockMetadata.from_bytes(data), BlockMetadata.from_json(known.to_json())):
        entry = back.entry(KEY, 9, created_at=3.0, used_at=7.0)
        assert (entry.key, entry.nbytes, entry.created_at, entry.used_at) == (KEY, 9, 3.0, 7.0)
        assert (entry.parent, entry.priority, entry.group) == (parent, priority, group)
        assert (entry.namespace, entry.model, entry.expires_at) == (namespace, model, end)
        assert (entry.tokens is None) == (tokens is None)
        assert tokens is None or entry.tokens.tolist() == tokens.tolist()
    assert all(BlockMetadata.from_bytes(data[:end]) is None for end in range(len(data)))


@pytest.mark.parametrize("end", [-1.0, 1e13, float("nan"), float("inf")])
def test_an_end_that_is_no_time_is_damage(end):
    wrong = replace(BlockMetadata.of(BARE), expires_at=end)
    assert BlockMetadata.from_bytes(wrong.to_bytes()) is None
    with pytest.raises(ValueError, match="is no time"):
        BlockMetadata.from_json(wrong.to_json())


@pytest.mark.parametrize("end", [-1.0, 1e13, float("nan"), float("inf"), -float("inf")])
def test_an_end_that_is_no_time_is_stored_as_the_nearest_time(end):
    """Else a store would write what it cannot read."""
    known = BlockMetadata.of(replace(BARE, expires_at=end))
    for back in (
        BlockMetadata.from_bytes(known.to_bytes()),
        Record.decode(Record.of([replace(BARE, expires_at=end)], 7.5, "a1").encode())
        .members[0]
        .metadata,
    ):
        assert back.expires_at == (1e12 if end > 0 else 0.0)


@given(st.binary(max_size=200))
def test_damaged_metadata_is_none_and_no_crash(data):
    known = BlockMetadata.from_bytes(data)
    assert known is None or len(known.to_bytes()) == len(data)


def test_children_come_back():
    for child in (child_from_bytes(child_to_bytes(CHILD)), child_from_json(child_to_json(CHILD))):
        assert child.key == KEY
        assert child.tokens.tolist() == WHOLE.tokens.tolist()


@pytest.mark.parametrize("data", [b"", KEY[:31], KEY + b"\0", KEY + b"\0\0\0"])
def test_other_bytes_are_no_children(data):
    assert child_from_bytes(data) is None
