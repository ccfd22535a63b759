"""What is between a frame and its payload: right bytes or a miss, within bounds, never deleted."""

from __future__ import annotations

import asyncio
import struct
import sys
import threading
import tracemalloc
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_store import DictTier

from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.backends import open_backend
from kvconnect.backends.guard import codecs, pieces
from kvconnect.backends.guard import frames as framing
from kvconnect.backends.guard.codecs import CodecFlag, Codecs
from kvconnect.backends.guard.frames import ScratchPair
from kvconnect.backends.url import StoreUrl, without_codec
from kvconnect.errors import BadFrame, ConfigurationError, MissingExtra
from kvconnect.kernels.quantized_payload import quantized_nbytes
from kvconnect.layout import KvCacheLayout
from kvconnect.testing import BlockMaker
from kvconnect.trace import metrics

LAYOUT = KvCacheLayout(4, 2, 64, 64, 16, torch.bfloat16)
NBYTES = LAYOUT.block_nbytes
FRAME = frame.frame_nbytes(NBYTES)


class Values(DictTier):
    """A dict of bytes that takes values of any length."""

    def __init__(self, **capabilities):
        super().__init__(**{"enumerable": True, "variable_length": True, **capabilities})


def fixed_length():
    """A store that loads values of known length only."""
    return Values(variable_length=False)


def content(number=0):
    """The bytes of a block: normal numbers, each row there twice so that any codec has its use."""
    rng = np.random.default_rng(number)
    values = rng.standard_normal((NBYTES // 4 // 64, 64)) * rng.uniform(0.1, 30, (1, 64))
    rows = torch.from_numpy(np.repeat(np.round(values, 1), 2, axis=0))
    return rows.to(torch.bfloat16).view(torch.uint8).view(-1)


def block(key, number=0, *, parent=None, tokens=None):
    data = torch.full((FRAME,), 0xC5, dtype=torch.uint8)
    frame.payload(data, NBYTES).copy_(content(number))
    array = None if tokens is None else np.asarray(tokens, np.int32)
    return StoredBlock(key, data, parent, array)


def buffer():
    return torch.full((FRAME,), 0xA7, dtype=torch.uint8)


async def loaded(store, key):
    """The payload of a block that can be loaded."""
    into = buffer()
    return frame.payload(into, NBYTES) if await store.load([key], [into]) else None


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("5e" * 32 + "\n")
    return str(path)


@pytest.fixture
def other_key_file(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"\x07" * 32)
    return str(path)


async def opened_store(inner, codec=None, key_file=None, **options):
    store = open_backend(inner, codec=codec, key_file=key_file, **options)
    await store.open([LAYOUT])
    return store


@pytest.fixture
async def opened(key_file):
    """Opens stores, with a key where their codec needs one, and closes them at the end."""
    async with AsyncExitStack() as stack:

        async def opened(inner, codec=None, **options):
            if codec and "aes-gcm" in codec:
                options = {"key_file": key_file, **options}
            store = await opened_store(inner, codec, **options)
            stack.push_async_callback(store.close)
            return store

        yield opened


def counter(name):
    return metrics.snapshot().get(name, 0)


LOSSLESS = ["zstd", "lz4", "aes-gcm", "zstd+aes-gcm", "lz4+aes-gcm"]
LOSSY = ["fp8", "int8", "fp8+zstd", "int8+lz4+aes-gcm"]


# ------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("codec", [*LOSSLESS, *LOSSY])
async def test_what_is_saved_comes_back_and_its_payload_stays_as_it_is(kit, opened, codec):
    inner = Values()
    store = await opened(inner, codec)
    keys = kit.keys(codec, count=5)
    blocks = [block(key, number) for number, key in enumerate(keys)]
    for _ in range(2):  # who saves a block twice must not store twice encoded bytes under its key
        inner.blocks.clear()
        assert await store.save(blocks) == 5
        into = [buffer() for _ in keys]
        assert await store.load(keys, into) == 5
        for number, (data, one) in enumerate(zip(into, blocks, strict=True)):
            assert torch.equal(frame.payload(one.data, NBYTES), content(number))
            got, wanted = (
                some.view(torch.bfloat16).float()
                for some in (frame.payload(data, NBYTES), content(number))
            )
            exact = codec in LOSSLESS
            assert torch.allclose(got, wanted, rtol=0 if exact else 0.07, atol=0 if exact else 0.5)
        sizes = {one.data.numel() for one in inner.blocks.values()}
        assert all(size % frame.ALIGNMENT == 0 for size in sizes)
        assert codec == "aes-gcm" or max(sizes) < FRAME


async def test_what_does_not_get_smaller_is_stored_as_it_is(kit, opened):
    inner = Values()
    store = await opened(inner, "zstd")
    key = kit.key("random")
    one = block(key)
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8))
    frame.payload(one.data, NBYTES).copy_(noise)
    await store.save([one])
    assert frame.check(inner.value(key), key, {LAYOUT.fingerprint()}).flags == 0
    assert torch.equal(await loaded(store, key), noise)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
async def test_anybody_reads_what_was_compressed(kit, opened, codec):
    inner = Values()
    store = await opened(inner, codec)
    await store.save([block(kit.key(1))])
    for other in (None, "lz4", "zstd"):
        reader = await opened(inner, other)
        assert torch.equal(await loaded(reader, kit.key(1)), content())


@pytest.mark.parametrize("codec", ["fp8", "int8"])
async def test_rounded_blocks_have_one_length_and_every_store_takes_them(kit, opened, codec):
    inner = fixed_length()
    store = await opened(inner, codec)
    keys = kit.keys(codec, count=3)
    await store.save([block(key, number) for number, key in enumerate(keys)])
    assert {one.data.numel() for one in inner.blocks.values()} == {
        frame.frame_nbytes(quantized_nbytes(LAYOUT))
    }
    assert await store.load(keys, [buffer() for _ in keys]) == 3


@pytest.mark.parametrize("url", ["memory:?", "disk:{}/store?"])
@pytest.mark.parametrize("codec", ["zstd", "fp8+zstd", "aes-gcm"])
async def test_own_stores_take_every_codec(kit, opened, tmp_path, url, codec):
    store = await opened(url.format(tmp_path) + "capacity=8MiB", codec)
    keys = kit.keys("own", count=6)
    assert await store.save([block(key, number) for number, key in enumerate(keys)]) == 6
    for number, key in enumerate(keys):
        back = await loaded(store, key)
        assert back is not None
        assert codec == "fp8+zstd" or torch.equal(back, content(number))


@pytest.mark.parametrize("scheme", ["memory:?", "disk:{}/store?"])
async def test_compressed_blocks_really_take_less_room(kit, tmp_path, scheme):
    held = {}
    for codec in ("", "&codec=fp8+zstd"):
        place = scheme.format(tmp_path / f"d{bool(codec)}")
        store = open_backend(f"{place}capacity={64 * FRAME}{codec}")
        await store.open([LAYOUT])
        for start in range(0, 192, 32):
            keys = kit.keys("room", count=192)[start : start + 32]
            await store.save([block(key, 1) for key in keys])
        held[bool(codec)] = (await store.stats())["blocks"]
        await store.close()
    assert held[False] <= 64
    assert held[True] >= 1.6 * held[False]


# ------------------------------------------------------------------------------- what is not ours


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ("fp8", None),
        ("fp8", "int8"),
        ("int8", "fp8+zstd"),
        (None, "fp8"),
        ("fp8+zstd", "zstd"),
        (None, "aes-gcm"),  # what anybody can write
    ],
)
async def test_another_encoding_is_a_miss_that_stays(kit, opened, saved, read):
    inner = Values()
    writer, reader = await opened(inner, saved), await opened(inner, read)
    await writer.save([block(kit.key(1))])
    assert await reader.load([kit.key(1)], [buffer()]) == 0
    assert kit.key(1) in inner.blocks
    assert await writer.load([kit.key(1)], [buffer()]) == 1


async def test_another_secret_is_a_miss_that_stays_and_is_told_of(
    kit, opened, key_file, other_key_file, caplog
):
    inner = Values()
    writer = await opened(inner, "aes-gcm")
    await writer.save([block(kit.key(1), parent=kit.key(0), tokens=[1, 2, 3])])
    metrics._warned.clear()
    before = counter("store.other_codec")
    for codec, file in (("aes-gcm", other_key_file), (None, None)):
        reader = await opened(inner, codec, key_file=file)
        assert await reader.load([kit.key(1)], [buffer()]) == 0
    assert "another key_file" in caplog.text
    assert counter("store.other_codec") == before + 2
    assert await writer.load([kit.key(1)], [buffer()]) == 1


async def test_a_package_that_is_missing_makes_it_a_miss(kit, opened, monkeypatch):
    inner = Values()
    writer, reader = await opened(inner, "zstd"), await opened(inner)
    await writer.save([block(kit.key(1))])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    codecs._compressor.cache_clear()
    assert await reader.load([kit.key(1)], [buffer()]) == 0
    assert kit.key(1) in inner.blocks


# ---------------------------------------------------------------------------------------- attacks


def resealed(value, header, key=None):
    """`value` with another header and a checksum that fits: what somebody in the store can do."""
    data = value.clone()
    nbytes = frame.frame_nbytes(header.payload_nbytes)
    data = torch.cat([data, torch.zeros(max(0, nbytes - len(data)), dtype=torch.uint8)])[:nbytes]
    frame.seal(data, header)
    return data


def header_of(value):
    return frame._read(value.numpy().data)


async def test_an_encrypted_block_under_another_key_is_rejected_whatever_its_header_says(
    kit, opened
):
    inner = Values()
    store = await opened(inner, "zstd+aes-gcm")
    first, second = kit.key(1), kit.key(2)
    await store.save([block(first, 1), block(second, 2)])
    moved = inner.value(first)
    header = header_of(moved)
    for forged in (header, header._replace(key=second)):
        inner.hold(second, resealed(moved, forged))
        assert await store.load([second], [buffer()]) == 0
        assert second not in inner.blocks


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header._replace(valid_tokens=header.valid_tokens - 1),
        lambda header: header._replace(flags=header.flags ^ CodecFlag.ZSTD),
        lambda header: header._replace(flags=header.flags ^ (CodecFlag.ZSTD | CodecFlag.LZ4)),
        lambda header: header._replace(payload_nbytes=header.payload_nbytes - 1),
    ],
    ids=["tokens", "not compressed", "another codec", "shorter"],
)
async def test_a_changed_header_of_an_encrypted_block_is_rejected(kit, opened, change):
    inner = Values()
    store = await opened(inner, "zstd+aes-gcm")
    key = kit.key(1)
    await store.save([block(key)])
    inner.hold(key, resealed(inner.value(key), change(header_of(inner.value(key)))))
    assert await store.load([key], [buffer()]) == 0
    assert key not in inner.blocks


async def test_nothing_of_the_block_or_its_tokens_is_in_an_encrypted_store(kit, opened):
    inner = Values()
    store = await opened(inner, "aes-gcm")
    tokens = list(range(70_000, 70_016))
    key, parent = kit.key(1), kit.key(0)
    await store.save([block(key, parent=parent, tokens=tokens)])
    stored = inner.value(key).numpy().tobytes()
    assert content().numpy().tobytes()[:64] not in stored
    (listed,) = inner.blocks.values()
    assert not set(listed.tokens.tolist()) & set(tokens)
    (child,) = await store.children(parent)
    assert child.tokens.tolist() == tokens
    # Moved after another block, or altered, they are nobody's tokens.
    inner.blocks = {key: replace(listed, parent=kit.key(9))}
    assert await store.children(kit.key(9)) == []
    inner.blocks = {key: replace(listed, tokens=listed.tokens[:5])}
    assert await store.children(parent) == []


async def test_two_saves_of_a_block_share_no_nonce(kit, opened):
    seen = set()
    for _ in range(2):
        inner = Values()
        store = await opened(inner, "aes-gcm")
        await store.save([block(kit.key(1))])
        seen.add(header_of(inner.value(kit.key(1))).codec_data[8:20])
    assert len(seen) == 2


def bomb(codec, nbytes):
    """Compressed data that becomes `nbytes` zeros."""
    if codec == "zstd":
        import zstandard

        return zstandard.ZstdCompressor(level=1).compress(bytes(nbytes))
    import lz4.block

    return lz4.block.compress(bytes(nbytes), store_size=False)


def liar(packed, says):
    """Compressed data whose header says that it becomes `says` bytes."""
    # Magic, descriptor with an eight-byte size of a single segment, size, then the blocks.
    body = packed[4:]
    field = {0: 1, 1: 2, 2: 4, 3: 8}[body[0] >> 6]
    return packed[:4] + bytes([0b11100000]) + struct.pack("<Q", says) + body[1 + field :]


def as_frame(key, packed, flags):
    header = frame.FrameHeader(16, len(packed), LAYOUT.fingerprint(), key, flags)
    data = torch.zeros(frame.frame_nbytes(len(packed)), dtype=torch.uint8)
    frame.payload(data, len(packed)).numpy()[:] = np.frombuffer(packed, np.uint8)
    frame.seal(data, header)
    return data


LIES = {
    "zstd: far more": lambda: bomb("zstd", 1 << 25),
    "zstd: says far more": lambda: liar(bomb("zstd", NBYTES), 1 << 40),
    "zstd: far more than it says": lambda: liar(bomb("zstd", 1 << 25), NBYTES),
    "zstd: a byte less": lambda: bomb("zstd", NBYTES - 1),
    "zstd: more behind it": lambda: bomb("zstd", NBYTES) + b"more",
    "zstd: cut": lambda: bomb("zstd", NBYTES)[:-1],
    "zstd: zeros": lambda: b"\0" * 100,
    "zstd: nothing": lambda: b"",
    "lz4: far more": lambda: bomb("lz4", 1 << 22),
    "lz4: a byte less": lambda: bomb("lz4", NBYTES - 1),
    "lz4: cut": lambda: bomb("lz4", NBYTES)[:-3],
    "lz4: ones": lambda: b"\xff" * 100,
    "lz4: nothing": lambda: b"",
}


async def load_lie(lie) -> int:
    """Loads a frame that lies, which is bad; returns how much memory that took."""
    inner, key = Values(), BlockMaker().key("bomb")
    store = await opened_store(inner)
    data = as_frame(key, LIES[lie](), CodecFlag[lie.partition(":")[0].upper()])
    assert data.numel() <= FRAME  # or it would not get that far
    inner.hold(key, data)
    into = buffer()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    assert await store.load([key], [into]) == 0
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert key not in inner.blocks
    await store.close()
    return peak


@pytest.mark.parametrize("lie", LIES)
async def test_a_frame_that_lies_about_its_lengths_is_bad_and_takes_no_memory(lie):
    await load_lie(lie)  # what is imported for it takes memory, too
    assert await load_lie(lie) < 4 * FRAME


@pytest.mark.parametrize(
    ("codec", "nbytes", "flags"),
    [
        *((None, NBYTES, flags) for flags in (32, 0x8000, CodecFlag.FP8 | CodecFlag.INT8, 3)),
        *(("fp8", nbytes, CodecFlag.FP8) for nbytes in (0, 100, quantized_nbytes(LAYOUT) - 1)),
    ],
)
async def test_impossible_flags_and_lengths_are_bad_frames(kit, opened, codec, nbytes, flags):
    inner = Values()
    store = await opened(inner, codec)
    inner.hold(kit.key(1), as_frame(kit.key(1), bytes(nbytes), flags))
    assert await loaded(store, kit.key(1)) is None
    assert not inner.blocks


def test_every_store_key_has_an_encryption_key_of_its_own(kit, key_file):
    cipher = Codecs.parse("aes-gcm", key_file).cipher
    data = bytearray(b"the same bytes" * 9)
    beside = cipher.encrypt(memoryview(bytes(data)), memoryview(data), kit.key(1), b"header")
    assert data != b"the same bytes" * 9
    with pytest.raises(BadFrame):
        cipher.decrypt(memoryview(bytearray(data)), kit.key(2), b"header", beside)
    cipher.decrypt(memoryview(data), kit.key(1), b"header", beside)
    assert data == b"the same bytes" * 9


@settings(max_examples=60, deadline=None)
@given(
    codec=st.sampled_from(["zstd", "lz4", "fp8+zstd"]),
    position=st.floats(0, 1, exclude_max=True),
    change=st.integers(1, 255),
    length=st.integers(-3, 3),
)
def test_damage_with_a_checksum_that_fits_is_a_miss_or_right(codec, position, change, length):
    # Not even a writer that seals what it damaged gets more than wrong bytes of the right length.
    async def run():
        inner = Values()
        store = await opened_store(inner, codec)
        key = b"k" * 32
        await store.save([block(key)])
        value = inner.value(key)
        header = header_of(value)
        packed = bytearray(frame.payload(value, header.payload_nbytes).numpy().tobytes())
        packed[int(position * len(packed))] ^= change
        packed = bytes(packed[:length]) if length < 0 else bytes(packed) + bytes(length)
        inner.hold(key, as_frame(key, packed, header.flags))
        into = buffer()
        loaded = await store.load([key], [into])
        assert loaded == (key in inner.blocks)
        await store.close()

    asyncio.run(run())


async def test_a_checksum_guards_encoded_frames_too(kit, opened):
    inner = Values()
    store = await opened(inner, "zstd")
    key = kit.key(1)
    for position in (3, 50, 80, 127, 128, 900):
        await store.save([block(key)])
        inner.value(key)[position] ^= 1
        assert await store.load([key], [buffer()]) == 0
        assert key not in inner.blocks


# -------------------------------------------------------------------------------- memory and time


async def test_encoding_happens_off_the_event_loop_and_piece_by_piece(kit, opened, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 2 * FRAME)
    ran_on, order = set(), []
    real = Codecs.encode

    def encode(*args):
        ran_on.add(threading.current_thread().name.rpartition("-")[0])
        order.append("encode")
        return real(*args)

    class Watched(Values):
        async def save(self, blocks):
            order.append("save")
            await asyncio.sleep(0)
            return await super().save(blocks)

    monkeypatch.setattr(Codecs, "encode", encode)
    store = await opened(Watched(), "zstd")
    keys = kit.keys("overlap", count=10)
    await store.save([block(key) for key in keys])
    assert ran_on == {"kvconnect-frames"}
    # The second piece is encoded while the first is saved, not after all of them or before any.
    assert order.count("save") == 5
    assert order.index("save") == 2
    assert order[-1] == "save"


async def test_scratch_memory_is_bounded_whatever_hangs(kit, opened, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 2 * FRAME)
    taken = []
    real = framing.ScratchPair.room

    def room(pair, number, nbytes):
        memory = real(pair, number, nbytes)
        taken.append((memory.untyped_storage().data_ptr(), memory.untyped_storage().nbytes()))
        return memory

    monkeypatch.setattr(framing.ScratchPair, "room", room)
    release = asyncio.Event()

    class Hangs(Values):
        async def save(self, blocks):
            await release.wait()
            return await super().save(blocks)

    store = await opened(Hangs(), "zstd", deadline_s=0.2)
    chains = [[block(key) for key in kit.keys("hang", n, count=6)] for n in range(8)]
    results = await asyncio.gather(*map(store.save, chains), return_exceptions=True)
    assert all(isinstance(result, TimeoutError) for result in results)
    assert sum(dict(taken).values()) <= 4 * (2 * FRAME + frame.ALIGNMENT)
    release.set()


# ---------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("zstandard", "unknown 'zstandard'; did you mean 'zstd'"),
        ("zstd+lz4", "two of a kind"),
        ("fp8+int8", "two of a kind"),
        ("zstd+fp8", "give one of fp8 and int8, then"),
        ("zstd+zstd", "give one of"),
        ("aes-gcm", "needs key_file="),
        ("+", "unknown ''"),
    ],
)
def test_a_codec_that_makes_no_sense_is_explained(codec, message):
    with pytest.raises(ConfigurationError, match=message.replace("+", r"\+")):
        open_backend(Values(), codec=codec)
    if codec != "+":
        with pytest.raises(ConfigurationError, match=message):
            open_backend(f"memory:?codec={codec}")


def test_a_key_file_is_checked_at_once(tmp_path, key_file):
    short = tmp_path / "short"
    short.write_bytes(b"123\n")
    for path, message in (
        (short, "3 bytes"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "dir"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            open_backend(Values(), codec="aes-gcm", key_file=str(path))
    with pytest.raises(ConfigurationError, match="is for codec=aes-gcm"):
        open_backend(Values(), codec="zstd", key_file=key_file)


def test_a_line_end_does_not_make_another_key(tmp_path):
    ids = set()
    for end in ("", "\n", "\r\n"):
        path = tmp_path / "key"
        path.write_text("ab" * 32 + end, newline="")
        ids.add(Codecs.parse("aes-gcm", str(path)).identity)
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (fixed_length, {"codec": "zstd"}, r"known length only \(variable_length is False\)"),
        (Values, {"codec": "lz4", "raw": True}, "codec=lz4"),
        (Values, {"codec": "lz4", "verify_frames": False}, "codec=lz4"),
    ],
)
def test_options_that_contradict_a_codec_are_refused(make, options, message):
    with pytest.raises(ConfigurationError, match=message):
        open_backend(make(), **options)


async def test_layouts_that_do_not_get_smaller_are_refused():
    layout = KvCacheLayout(1, 1, 64, 64, 16, torch.float8_e4m3fn)
    store = open_backend(Values(), codec="fp8")
    with pytest.raises(ConfigurationError, match="use a lossless codec"):
        await store.open([layout])
    await store.close()


def test_the_url_and_the_argument_must_agree(key_file):
    assert str(open_backend("memory:?codec=zstd", codec="zstd").codecs) == "zstd"
    with pytest.raises(ConfigurationError, match="the store URL says codec=zstd"):
        open_backend("memory:?codec=zstd", codec="lz4")
    opened = open_backend("memory:?codec=zstd")
    assert open_backend(opened) is opened
    with pytest.raises(ConfigurationError, match="has its own"):
        open_backend(opened, codec="lz4")


def test_every_scheme_takes_the_parameters_and_no_backend_sees_them(tmp_path, key_file):
    url = StoreUrl.parse(f"disk:///x?codec=zstd+aes-gcm&key_file={key_file}&ttl=7d")
    assert (url.codec, url.key_file, dict(url.query)) == ("zstd+aes-gcm", key_file, {"ttl": "7d"})
    assert StoreUrl.parse("memory:?codec=zstd%2Baes-gcm").codec == "zstd+aes-gcm"
    assert "codec=zstd+aes-gcm" in str(url)
    store = open_backend(f"disk://{tmp_path}/s?codec=fp8+zstd+aes-gcm&key_file={key_file}")
    assert str(store.codecs) == "fp8+zstd+aes-gcm"
    with pytest.raises(ConfigurationError, match="did you mean 'codec'"):
        open_backend("memory:?codecs=zstd")


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("disk:///x?codec=zstd", "disk:///x"),
        ("disk:///x?codec=zstd+aes-gcm&key_file=/k&ttl=7d", "disk:///x?ttl=7d"),
        ("disk:///x?ttl=7d&codec=fp8&capacity=1GiB", "disk:///x?ttl=7d&capacity=1GiB"),
        ("memory:", "memory:"),
        ("s3://b/p?endpoint_url=http://h:1/?codec", "s3://b/p?endpoint_url=http://h:1/?codec"),
    ],
)
def test_a_url_without_its_codec_is_for_raw_access(url, plain):
    assert without_codec(url) == plain


async def test_raw_access_leaves_frames_encoded(kit, opened):
    inner = Values()
    store = await opened(inner, "zstd+aes-gcm")
    await store.save([block(kit.key(1), tokens=[1, 2, 3])])
    raw = open_backend(inner, raw=True)
    await raw.open([])
    stored = inner.value(kit.key(1))
    into = torch.zeros(stored.numel(), dtype=torch.uint8)
    assert await raw.load([kit.key(1)], [into]) == 1
    assert torch.equal(into, stored)
    # What a tool needs to tell that it is sound: no secret.
    assert frame.check(into, kit.key(1), None).valid_tokens == 3
    copy = Values()
    other = open_backend(copy, raw=True)
    await other.open([])
    await other.save([replace(inner.blocks[kit.key(1)], data=into)])
    reader = await opened(copy, "zstd+aes-gcm")
    assert torch.equal(await loaded(reader, kit.key(1)), content())
    for one in (store, raw, other, reader):
        await one.close()


@pytest.mark.parametrize(
    ("codec", "module"), [("zstd", "zstandard"), ("lz4", "lz4.block"), ("aes-gcm", "cryptography")]
)
def test_a_missing_package_names_the_extra(monkeypatch, key_file, codec, module):
    codecs._compressor.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    if module == "cryptography":
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[codecs\]'"):
        open_backend(Values(), codec=codec, key_file=key_file if "aes-gcm" in codec else None)


def test_only_what_changes_what_comes_back_changes_the_identity(key_file, other_key_file):
    def identity(codec, file=None):
        return Codecs.parse(codec, file).identity

    assert identity(None) == identity("zstd") == identity("lz4") == b""
    different = {
        identity("fp8"),
        identity("int8"),
        identity("aes-gcm", key_file),
        identity("aes-gcm", other_key_file),
        identity("fp8+aes-gcm", key_file),
    }
    assert len(different) == 5
    assert identity("fp8") == identity("fp8+zstd")


def test_the_checksum_covers_what_the_codecs_need(kit):
    # 72 bytes of fields, 40 for the codecs, 16 of checksum.
    assert frame.CODEC_DATA_NBYTES == 40
    header = frame.FrameHeader(16, 100, LAYOUT.fingerprint(), kit.key(1), 16, b"d" * 36)
    data = torch.zeros(frame.frame_nbytes(100), dtype=torch.uint8)
    frame.seal(data, header)
    assert frame.check(data, kit.key(1), None).codec_data == b"d" * 36 + bytes(4)
    data[80] ^= 1
    with pytest.raises(BadFrame, match="checksum"):
        frame.check(data, kit.key(1), None)


def test_a_piece_is_encoded_beside_the_one_that_is_being_stored():
    pair = ScratchPair()
    rooms = [pair.room(number, 5000) for number in range(3)]
    assert rooms[0].data_ptr() == rooms[2].data_ptr()
    assert abs(rooms[0].data_ptr() - rooms[1].data_ptr()) >= 5000
