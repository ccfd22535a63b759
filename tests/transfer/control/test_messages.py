"""Messages and their bytes: all that is valid comes back, nothing else does."""

from __future__ import annotations

import struct

import msgpack
import pytest
import torch
from endpoints import COMPAT
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvconnect.errors import BadMessage, ConfigurationError
from kvconnect.keys import KEY_NBYTES
from kvconnect.layout import KvCacheLayout
from kvconnect.transfer.control import messages
from kvconnect.transfer.control.description import PoolInfo
from kvconnect.transfer.control.fields import MAX_ENTRIES
from kvconnect.transfer.control.keyed import ClaimKeys, FindKeys, FoundChildren, GrantKeys, digested
from kvconnect.transfer.control.messages import (
    Claim,
    Grant,
    Hello,
    LeaseId,
    Ping,
    Renew,
    Watermark,
    decode,
    encode,
)

NUMBERS = st.integers(0, (1 << 31) - 1)
COUNTS = st.integers(0, (1 << 63) - 1)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
IDS = st.lists(NUMBERS, max_size=20).map(tuple)
GROUPS = st.lists(IDS, max_size=3).map(tuple)
SECONDS = st.floats(0, 86_400, exclude_min=True)
WATERMARKS = st.builds(Watermark, layers=NUMBERS, tokens=NUMBERS)
LEASES = st.lists(st.builds(LeaseId, request=NAMES, epoch=COUNTS), max_size=3).map(tuple)
LEASE = {"request": NAMES, "epoch": COUNTS}
ASKED = {"seq": COUNTS, **LEASE}
POOLS = st.builds(
    PoolInfo,
    **dict.fromkeys(("region", "num_blocks", "num_layers", "num_kv_heads", "key_dim"), NUMBERS),
    value_dim=NUMBERS,
    tokens_per_block=NUMBERS,
    dtype=NAMES,
    window=st.none() | NUMBERS,
    layers=IDS,
)
OFFERED = {
    "lease_s": SECONDS,
    "tokens": NUMBERS,
    "blocks": GROUPS,
    "watermark": WATERMARKS,
}
KEYS = st.lists(st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES), max_size=4).map(tuple)
FIELDS = {
    "Proof": {"mac": st.binary(min_size=32, max_size=32)},
    "Hello": {
        "compat": st.just(COMPAT),
        "engine_id": NAMES,
        "boot": st.binary(min_size=16, max_size=16),
        "rank": NUMBERS,
        "tp_size": st.integers(1, 64),
        "local": st.binary(max_size=100),
        "pools": st.lists(POOLS, max_size=2).map(tuple),
    },
    "Error": {
        "kind": st.sampled_from(["refused", "closing"]),
        "field": TEXTS,
        "message": TEXTS,
    },
    "Ping": {"number": COUNTS},
    "Pong": {"number": COUNTS},
    "Claim": {
        "seq": COUNTS,
        "request": NAMES,
        "epoch": st.none() | COUNTS,
        "readers": st.integers(1, 4096),
    },
    "Grant": ASKED | OFFERED,
    "Expired": ASKED,
    "Unknown": {"seq": COUNTS, "request": NAMES, "epoch": st.none() | COUNTS},
    "WatermarkOf": {**LEASE, "watermark": WATERMARKS, "first": IDS, "blocks": GROUPS},
    "Renew": {"seq": COUNTS, "leases": LEASES},
    "Renewed": {
        "seq": COUNTS,
        "leases": st.lists(
            st.builds(messages.RenewedLease, **LEASE, lease_s=SECONDS, watermark=WATERMARKS),
            max_size=3,
        ).map(tuple),
        "expired": LEASES,
        "unknown": LEASES,
    },
    "Release": ASKED,
    "ReleasedOk": ASKED,
    "Abort": {"request": NAMES, "epoch": st.none() | COUNTS, "reason": TEXTS},
    "FindKeys": {"seq": COUNTS, "keys": KEYS},
    "FoundKeys": {"seq": COUNTS, "found": st.binary(max_size=20)},
    "ClaimKeys": {
        "seq": COUNTS,
        "request": NAMES,
        "keys": KEYS,
        "verify": st.sampled_from(["full", "sample", "none"]),
    },
    "GrantKeys": {
        **ASKED,
        "lease_s": SECONDS,
        "region": NUMBERS,
        "unit": st.just(1 << 20),
        "sizes": st.just((0, 1 << 20, (1 << 20) + 1)),
        "units": st.lists(NUMBERS, min_size=3, max_size=3).map(tuple),
        "digests": st.lists(st.integers(0, (1 << 64) - 1), max_size=3).map(tuple),
    },
    "FindChildren": {
        "seq": COUNTS,
        "parent": st.none() | st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES),
    },
    "FoundChildren": {
        "seq": COUNTS,
        "keys": st.just((b"a" * KEY_NBYTES, b"b" * KEY_NBYTES)),
        "lengths": st.just((0, 2)),
        "tokens": st.binary(min_size=8, max_size=8),
    },
    "ForgetKeys": {"seq": COUNTS, "keys": KEYS},
    "ForgotKeys": {"seq": COUNTS},
    "FindDigest": {
        "seq": COUNTS,
        "region": NUMBERS,
        "nbytes": st.integers(1, (1 << 48) - 1),
        "offsets": st.lists(COUNTS, min_size=1, max_size=4).map(tuple),
    },
    "FoundDigest": {"seq": COUNTS, "digest": st.none() | st.integers(0, (1 << 64) - 1)},
}
CLASSES = {cls.__name__: cls for cls in messages.Message.__subclasses__()}
MESSAGES = st.one_of([st.builds(CLASSES[name], **fields) for name, fields in FIELDS.items()])


def test_every_message_is_tried_here():
    assert set(CLASSES) == set(FIELDS)
    codes = [cls.code for cls in messages.Message.__subclasses__()]
    assert len(set(codes)) == len(codes)


@settings(max_examples=60)
@given(MESSAGES)
def test_a_message_comes_back_as_it_was(message):
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)


def test_the_bytes_stay_what_they_are():
    """Other versions of kvconnect read them: a change needs another `PROTOCOL`."""
    grant = Grant(
        seq=1,
        request="r",
        epoch=2,
        lease_s=10.0,
        tokens=64,
        blocks=((7, 8),),
        watermark=Watermark(layers=1, tokens=32),
    )
    assert encode(grant) == msgpack.packb(
        [
            12,
            {
                "seq": 1,
                "request": "r",
                "epoch": 2,
                "lease_s": 10.0,
                "tokens": 64,
                "blocks": [struct.pack("<2i", 7, 8)],
                "watermark": {"layers": 1, "tokens": 32},
            },
        ]
    )


def test_the_bytes_of_keys_stay_what_they_are():
    claim = ClaimKeys(seq=1, request="r", keys=(b"a" * 32, b"b" * 32), verify="full")
    said = {"seq": 1, "request": "r", "keys": b"a" * 32 + b"b" * 32, "verify": "full"}
    assert encode(claim) == msgpack.packb([32, said])


@pytest.mark.parametrize(
    ("units", "sizes"), [((1,), (0,)), ((), (1,)), ((1, 2), (4096,)), ((1,), (4097,))]
)
def test_a_grant_of_other_units_than_its_sizes_take_is_refused(units, sizes):
    fields = {"seq": 1, "request": "r", "epoch": 1, "lease_s": 1.0, "region": 0, "unit": 4096}
    with pytest.raises(ValidationError, match="units"):
        GrantKeys(**fields, units=units, sizes=sizes)


@pytest.mark.parametrize(
    ("lengths", "tokens"), [((2,), b"a" * 7), ((2,), b"a" * 12), ((1, 1), b"a" * 8), ((), b"")]
)
def test_children_of_other_tokens_than_their_lengths_say_are_refused(lengths, tokens):
    with pytest.raises(ValidationError, match=r"lengths|tokens"):
        FoundChildren(seq=1, keys=(b"a" * 32,), lengths=lengths, tokens=tokens)


@pytest.mark.parametrize("keys", [b"a" * 31, b"a" * 33, [b"a" * 31], b"a" * 32 * 8193])
def test_keys_that_are_none_or_too_many_are_refused(keys):
    with pytest.raises(BadMessage, match=r"FindKeys\.keys"):
        decode(msgpack.packb([FindKeys.code, {"seq": 1, "keys": keys}]))


def test_which_blocks_have_a_digest():
    assert list(digested("full", 3)) == [0, 1, 2]
    assert list(digested("sample", 33)) == [0, 16, 32]
    assert list(digested("sample", 1)) == [0]
    assert list(digested("none", 33)) == []


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_are_a_message(data):
    try:
        message = decode(data)
    except BadMessage:
        return
    assert isinstance(message, messages.Message)


LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats()),
    *(TEXTS, st.binary(max_size=9)),
)
SAID = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(TEXTS | st.binary(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.sampled_from(sorted(FIELDS)), st.data())
def test_a_message_with_one_field_that_is_anything_is_refused_or_valid(name, data):
    cls = CLASSES[name]
    code, fields = msgpack.unpackb(encode(data.draw(st.builds(cls, **FIELDS[name]))))
    fields[data.draw(st.sampled_from(sorted(cls.model_fields)) | TEXTS)] = data.draw(SAID)
    try:
        message = decode(msgpack.packb([code, fields]))
    except BadMessage:
        return
    assert decode(encode(message)) == message


@settings(max_examples=30)
@given(MESSAGES, st.data())
def test_a_message_that_is_cut_or_continued_is_refused(message, data):
    whole = encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        with pytest.raises(BadMessage):
            decode(wrong)


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ([4, {"number": -1}], "Ping.number"),
        ([4, {"number": True}], "Ping.number"),
        ([4, {"number": "1"}], "Ping.number"),
        ([4, {"number": 1.0}], "Ping.number"),
        ([4, {}], "Ping.number"),
        ([4, {"number": 1, "other": 1}], "Ping.other"),
        ([99, {}], "code"),
        ([True, {}], "code"),
        ([4], "fields"),
        ([4, {"number": 1}, 1], "fields"),
        ({"code": 4}, "fields"),
        ([18, {"seq": 1, "request": "", "epoch": 1}], "Release.request"),
        ([12, {"lease_s": float("nan")}], "Grant"),
        ([15, {"request": "r", "epoch": 1, "blocks": [b"123"]}], "WatermarkOf"),
        (
            [
                15,
                {
                    "request": "r",
                    "epoch": 1,
                    "watermark": {"layers": 1, "tokens": 1},
                    "blocks": [struct.pack("<i", -1)],
                },
            ],
            "WatermarkOf.blocks",
        ),
        ([16, {"seq": 1, "leases": [{"request": "r"}]}], "Renew.leases.0.epoch"),
    ],
)
def test_what_is_wrong_is_named_and_its_value_is_not(said, where):
    with pytest.raises(BadMessage, match=where.replace(".", r"\.")):
        decode(msgpack.packb(said))


def test_an_array_that_claims_to_be_long_is_refused_before_room_is_made_for_it():
    """The unpacker makes room for what a header claims, at each depth."""
    claims = b"\xdd" + struct.pack(">I", MAX_ENTRIES + 1)
    for data in (claims + bytes(MAX_ENTRIES + 1), claims * 500 + bytes(MAX_ENTRIES + 1)):
        with pytest.raises(BadMessage, match="no MessagePack"):
            decode(data)


def test_deep_nesting_is_refused():
    with pytest.raises(BadMessage):
        decode(b"\x91" * 100_000 + b"\xc0")


def test_a_message_that_is_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_NBYTES", 4000)
    many = tuple(range(1000))
    grant = Grant(
        seq=1,
        request="r",
        epoch=2,
        lease_s=10.0,
        tokens=64,
        blocks=(many,),
        watermark=Watermark(layers=1, tokens=32),
    )
    with pytest.raises(ConfigurationError, match=r"Grant: .* at most 4000"):
        encode(grant)


def test_fields_are_checked_where_a_message_is_made():
    with pytest.raises(ValidationError):
        Claim(seq=1, request="r" * 513)
    with pytest.raises(ValidationError):
        Renew(seq=1, leases=(LeaseId(request="r", epoch=1),) * (MAX_ENTRIES + 1))
    with pytest.raises(ValidationError):
        Ping(number=1).number = 2


def test_a_layout_travels_with_its_pool():
    layout = KvCacheLayout(3, 2, 192, 128, 16, torch.bfloat16, window=64, layers=(0, 2, 5))
    pool = PoolInfo.of(4, 100, layout)
    hello = Hello(compat=COMPAT, engine_id="p", boot=bytes(16), pools=(pool,))
    again = decode(encode(hello)).pools[0]
    assert again.layout() == layout
    assert (again.region, again.num_blocks) == (4, 100)


@pytest.mark.parametrize("dtype", ["float99", "load", "nn"])
def test_a_dtype_of_a_peer_that_torch_does_not_have_is_refused(dtype):
    layout = KvCacheLayout(3, 2, 8, 8, 16, torch.float64)
    pool = PoolInfo.of(4, 100, layout).model_copy(update={"dtype": dtype})
    with pytest.raises(ConfigurationError, match=f"dtype: '{dtype}'"):
        pool.layout()
