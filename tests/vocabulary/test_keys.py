"""Block keys: equal where the KV is equal, different wherever it may differ."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect import keys
from kvconnect.errors import ConfigurationError
from kvconnect.keys import (
    KEY_NBYTES,
    KeyChain,
    Namespace,
    Shard,
    chain_key,
    chain_keys,
    root_key,
    split_keys,
    store_key,
    store_keys,
)
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenBuffer

LAYOUT = KvCacheLayout(2, 2, 8, 8, 16, torch.float32)
MODEL = b"m" * 32
ROOT = root_key(MODEL, [LAYOUT], Namespace())
TOKENS = np.arange(100, dtype=np.int32)


def chain(tokens=TOKENS, size=16, root=ROOT) -> KeyChain:
    return KeyChain(root, size, TokenBuffer(np.asarray(tokens, np.int32)))


@pytest.mark.parametrize(
    "other",
    [
        root_key(b"n" * 32, [LAYOUT], Namespace()),
        root_key(MODEL, [dataclasses.replace(LAYOUT, dtype=torch.bfloat16)], Namespace()),
        root_key(MODEL, [dataclasses.replace(LAYOUT, tokens_per_block=32)], Namespace()),
        root_key(MODEL, [dataclasses.replace(LAYOUT, num_layers=3)], Namespace()),
        root_key(MODEL, [dataclasses.replace(LAYOUT, window=64)], Namespace()),
        root_key(MODEL, [LAYOUT, LAYOUT], Namespace()),
        root_key(MODEL, [LAYOUT], Namespace(cache_salt="tenant")),
        root_key(MODEL, [LAYOUT], Namespace(lora_id=1)),
        root_key(MODEL, [LAYOUT], Namespace(extra_key="picture")),
    ],
    ids=["model", "dtype", "block", "geometry", "window", "pools", "salt", "adapter", "extra"],
)
def test_whatever_changes_the_bytes_changes_the_root(other):
    assert other != ROOT


@pytest.mark.parametrize(
    ("namespace", "encoded", "root"),
    [
        (Namespace(), "dc8fdb171605ffc70e3419b7", "bfdbe8d753dd05bee6e4ed62"),
        (Namespace("tenant"), "a5f005e26c5a55ef65f02165", "8bf16aad34e7de703216468c"),
        (Namespace("é" * 3000), "d0c3856a35be0d185ffe6e51", "1194a14b5e157cfa79f77fca"),
        (Namespace("t", lora_id=7), "818860e67747c6980dc8cd47", "2defd096bc55fe091e636652"),
        (
            Namespace("t", lora_id="7", extra_key="picture"),
            "6e3b272cf8b53cbb153df829",
            "ab41d1daa74c27c87fc4b13b",
        ),
        (Namespace(None, None, 0), "e6c8de0a4413be46de59b107", "295355e79ec0993f53464ae5"),
    ],
)
def test_keys_of_namespaces_are_those_of_earlier_releases(namespace, encoded, root):
    """What was stored under them is found again."""
    layout = KvCacheLayout(2, 4, 8, 8, 16, torch.bfloat16)
    assert namespace.encode().hex().startswith(encoded)
    assert root_key(MODEL, [layout], namespace).hex().startswith(root)
    assert root_key(MODEL, [layout], namespace.id) == root_key(MODEL, [layout], namespace)


def test_a_namespace_that_is_kept_has_no_texts():
    salt = "tenant" * 100_000
    kept = Namespace(salt, lora_id="adapter").id
    assert dataclasses.astuple(kept) == (Namespace(salt, "adapter").encode(), "adapter", True)
    assert kept == Namespace(salt, lora_id="adapter").id != Namespace(salt).id
    assert not Namespace(lora_id="adapter").id.has_cache_salt


def test_another_format_version_changes_the_root(monkeypatch):
    monkeypatch.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
    assert root_key(MODEL, [LAYOUT], Namespace()) != ROOT


OPTIONAL_TEXT = st.none() | st.text(min_size=1)
OPTIONAL = st.none() | st.integers() | st.text()
NAMESPACES = st.builds(Namespace, OPTIONAL_TEXT, OPTIONAL, OPTIONAL)


@given(NAMESPACES, NAMESPACES)
def test_two_namespaces_look_alike_only_if_they_are_equal(first, second):
    assert (first.encode() == second.encode()) == (first == second)


def test_a_field_does_not_slide_into_the_next():
    assert Namespace("ab", "c").encode() != Namespace("a", "bc").encode()
    assert Namespace(lora_id=1).encode() != Namespace(lora_id="1").encode()
    assert Namespace(lora_id=1).encode() != Namespace(extra_key=1).encode()
    assert Namespace(lora_id="").encode() != Namespace(lora_id=None).encode()


@pytest.mark.parametrize(
    ("salt", "said"), [("", "cache_salt: '' must not be empty"), (5, "cache_salt: 5 must be a str")]
)
def test_a_salt_is_text_that_is_not_empty(salt, said):
    with pytest.raises(ConfigurationError, match=said):
        Namespace(cache_salt=salt)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_blocks_have_one_key_exactly_as_far_as_the_prefix_is_the_same(first, second):
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    size = 4
    pairs = list(zip(chain(first, size).keys(), chain(second, size).keys(), strict=False))
    for index, (left, right) in enumerate(pairs):
        assert (left == right) == ((index + 1) * size <= shared)


def test_a_tail_is_not_the_full_block_it_begins():
    full = chain_key(ROOT, TOKENS[:16])
    assert chain_key(ROOT, TOKENS[:15]) != full
    assert chain(TOKENS[:15]).tail(15) == chain_key(ROOT, TOKENS[:15])


@pytest.mark.parametrize("num_tokens", [0, 16, 32, 101])
def test_only_a_partial_block_has_a_tail(num_tokens):
    with pytest.raises(ConfigurationError, match="does not end a partial block"):
        chain().tail(num_tokens)


def test_the_digests_stay_the_same():
    # What is in stores, on disk and in other processes has these names.
    first, second = chain(root=b"r" * 32).keys(0, 2)
    assert (first.hex()[:16], second.hex()[:16]) == ("3bd4fc6b8f4bdc28", "a5c627743935a734")
    assert chain(TOKENS[:37], root=b"r" * 32).tail(37).hex()[:16] == "78a7b4f9694be58a"
    assert chain(TOKENS[:3], 1, b"r" * 32).keys()[-1].hex()[:16] == "bed984941c98eb1d"


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    st.integers(1, 9),
    st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES),
)
def test_a_run_of_keys_is_one_key_after_another(tokens, size, parent):
    tokens = np.array(tokens, np.int32)
    expected = []
    for start in range(0, len(tokens), size):
        block = tokens[start : start + size]
        parts = (
            expected[-1] if expected else parent,
            struct.pack("<q", len(block)),
            block.tobytes(),
        )
        expected.append(keys._digest(b"kvc-block", parts))
    for form in (bytes, bytearray):
        assert split_keys(chain_keys(parent, form(tokens.tobytes()), size)) == expected


@pytest.fixture
def num_hashed(monkeypatch):
    """How many keys were hashed."""
    hashed = []

    def counting(*args):
        found = chain_keys(*args)
        hashed.extend(split_keys(found))
        return found

    monkeypatch.setattr(keys, "chain_keys", counting)
    return lambda: len(hashed)


def test_keys_are_hashed_once(num_hashed):
    one = chain()
    assert one.keys() == one.keys() == one.keys(0, 3) + one.keys(3)
    assert num_hashed() == len(one) == 6


def test_keys_are_hashed_only_as_far_as_they_are_asked_for(num_hashed):
    chain().keys(0, 2)
    assert num_hashed() == 2
    assert chain().keys(2, 2) == []


def test_a_chain_follows_its_tokens_forward_and_back():
    tokens = TokenBuffer(TOKENS[:40])
    one = KeyChain(ROOT, 16, tokens)
    before = one.keys()
    tokens.extend(TOKENS[40:64])
    assert one.keys() == chain(TOKENS[:64]).keys()
    tokens.truncate(40)
    one.truncate(40)
    assert one.keys() == before
    tokens.extend(np.full(24, 7, np.int32))
    assert one.keys()[:2] == before
    assert one.keys()[2:] != chain(TOKENS[:64]).keys()[2:]


def test_the_parent_of_a_block_is_the_one_before_it():
    one = chain()
    assert one.parent(0) == ROOT
    assert one.parent(3) == one.keys()[2]


def test_a_store_key_tells_groups_and_shards_apart():
    key = chain().keys()[0]
    shards = [Shard(0, 2), Shard(1, 2), Shard(0, 1, 1, 2), Shard()]
    found = {store_key(key, group, shard) for group in (0, 1) for shard in shards}
    assert len(found) == 2 * len(shards)
    assert key not in found


@given(
    st.lists(st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES), max_size=4),
    st.integers(0, 3),
    st.builds(Shard, *[st.integers(0, 9)] * 4),
)
def test_store_keys_are_digests_of_key_and_place(found, group, shard):
    place = struct.pack("<5q", group, *dataclasses.astuple(shard))
    expected = [keys._digest(b"kvc-store", (key, place)) for key in found]
    assert store_keys(found, group, shard) == expected
    assert [store_key(key, group, shard) for key in found] == expected


def test_what_a_snapshot_hashed_is_not_hashed_again(num_hashed):
    one = chain(TOKENS[:40])
    snapshot = one.snapshot()
    assert snapshot.keys() == chain(TOKENS[:40]).keys()
    before = num_hashed()
    assert one.num_hashed == 0  # the snapshot's keys are its own
    one.adopt(snapshot)
    assert one.keys() == snapshot.keys()
    assert num_hashed() == before


@given(st.integers(0, 99), st.integers(0, 6), st.integers(0, 100))
def test_of_tokens_that_changed_a_snapshot_tells_nothing(changed, num_hashed, num_left):
    tokens = TokenBuffer(TOKENS)
    one = KeyChain(ROOT, 16, tokens)
    snapshot = one.snapshot()
    snapshot.keys(0, num_hashed)
    others = TOKENS.copy()
    others[changed] += 1
    tokens.truncate(0)
    one.truncate(0)
    tokens.extend(others[:num_left])
    one.adopt(snapshot)
    assert one.keys() == chain(others[:num_left]).keys()
    assert snapshot.keys() == chain().keys()
