"""What stores write of a block beside its bytes: the same bytes as ever, and back again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvconnect.backend import StoredBlock
from kvconnect.backends.redis.format import Head, child_from, entry_from, member_of, metadata_of
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
TOKENS = "0000000001000000ffffffffffffff7f00000080"
KEY_HEX, PARENT_HEX = KEY.hex(), PARENT.hex()


@pytest.mark.parametrize(
    ("block", "metadata", "member"),
    [
        (BARE, "2300000000000000000000000000", KEY_HEX),
        (
            WHOLE,
            f"4703000000010500060006000000{PARENT_HEX}{b'space'.hex()}{b'model!'.hex()}{TOKENS}",
            KEY_HEX + TOKENS,
        ),
    ],
    ids=["bare", "whole"],
)
def test_redis_writes_these_bytes(block, metadata, member):
    assert metadata_of(block).hex() == metadata
    assert member_of(block).hex() == member


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        (BARE, {"priority": 35}),
        (
            WHOLE,
            {
                "priority": 71,
                "parent": PARENT_HEX,
                "tokens": "AAAAAAEAAAD/////////fwAAAIA=",
                "namespace": b"space".hex(),
                "model": b"model!".hex(),
                "group": 3,
            },
        ),
    ],
    ids=["bare", "whole"],
)
def test_s3_writes_these_bytes(block, fields):
    listed = {"key": KEY_HEX, "offset": 0, "nbytes": 9, **fields}
    content = {"at": 7.5, "payload": "a1", "blocks": [listed]}
    encoded = Record.of([block], 7.5, "a1").encode()
    assert encoded[20:] == json.dumps(content, separators=(",", ":")).encode()  # in this order
    assert unpack(encoded) == content


@pytest.mark.parametrize("block", [BARE, WHOLE], ids=["bare", "whole"])
def test_both_tell_the_same_of_a_block(block):
    metadata = metadata_of(block)
    head = Head(len(metadata), 9, 9, b"nonce678", 7.5)
    (member,) = Record.decode(Record.of([block], 7.5, None).encode()).members
    for entry in (entry_from(KEY, head, metadata, 7.5), member.entry(7.5)):
        assert (entry.key, entry.nbytes, entry.created_at, entry.used_at) == (KEY, 9, 7.5, 7.5)
        assert (entry.parent, entry.priority, entry.group) == (
            block.parent,
            block.priority,
            block.group,
        )
        assert (entry.namespace, entry.model) == (block.namespace, block.model)
        assert (entry.tokens is None) == (block.tokens is None)
        assert entry.tokens is None or np.array_equal(entry.tokens, block.tokens)
    child = child_from(member_of(WHOLE))
    assert child.key == KEY
    assert child.tokens.tolist() == WHOLE.tokens.tolist()
