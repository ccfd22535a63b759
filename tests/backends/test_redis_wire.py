"""Answers of a Redis server, in whatever pieces they arrive, and answers that make no sense."""

from __future__ import annotations

import itertools
import socket

import hiredis
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvconnect import frame
from kvconnect.backends.redis import wire as redis_wire
from kvconnect.backends.redis.commands import (
    Ask,
    Outcome,
    Put,
    Redirect,
    Refused,
    Want,
    ask,
    command,
)
from kvconnect.backends.redis.format import Head
from kvconnect.backends.redis.load import fetch
from kvconnect.backends.redis.save import put
from kvconnect.backends.redis.settings import Address
from kvconnect.backends.redis.wire import Wire
from kvconnect.errors import BackendUnavailable, BadFrame
from kvconnect.frame import HEADER_NBYTES, FrameChecksum, FrameHeader, frame_nbytes
from kvconnect.keys import BlockKey

SERVER = Address("here", 6379)
CANARY = 0xC5


class Tape(socket.socket):
    """A socket whose peer says `answer` in pieces cut at `cuts`, and then goes."""

    def __init__(self, answer: bytes, cuts=()):
        super().__init__()
        edges = [0, *sorted(cuts), len(answer)]
        self.pieces = [answer[a:b] for a, b in itertools.pairwise(edges) if a < b]
        self.sent = b""

    def recv_into(self, view, nbytes, flags=0):
        if not self.pieces:
            return 0
        piece = self.pieces.pop(0)
        if len(piece) > nbytes:
            self.pieces.insert(0, piece[nbytes:])
        view[: min(nbytes, len(piece))] = piece[:nbytes]
        return min(nbytes, len(piece))

    def sendmsg(self, buffers):
        data = b"".join(buffers)[:20_000]  # never all at once
        self.sent += data
        return len(data)


@pytest.fixture
def wire():
    """Makes the wire to a server that will say what it is told to."""
    tapes = []

    def make(answer, cuts=()):
        tapes.append(Tape(answer, cuts))
        return Wire(tapes[-1], SERVER, 5.0)

    yield make
    for tape in tapes:
        tape.close()


def bulk(data):
    return b"$%d\r\n%s\r\n" % (len(data), data)


def value(content, metadata=b"meta"):
    return bulk(
        Head(len(metadata), len(content), len(content), b"nonce678", 1.0).pack()
        + metadata
        + content
    )


def fetched(wire, answer, sizes, cuts=(), **options):
    """What fetching values into buffers of `sizes` gave, and the buffers, margins checked."""
    wholes = [bytearray([CANARY]) * (size + 64) for size in sizes]
    wants = [
        Want(b"name", memoryview(whole)[32 : 32 + size])
        for whole, size in zip(wholes, sizes, strict=True)
    ]
    one = wire(answer, cuts)
    results = fetch(one, wants, **options)
    one.done()
    for whole in wholes:
        assert whole[:32] == whole[-32:] == bytes([CANARY]) * 32
    return results, [bytes(want.into) for want in wants]


CONTENT = bytes(range(200, 220))
THREE = value(CONTENT) + b"$-1\r\n" + value(b"\r\n$5\r\n")


def test_values_come_whole_wherever_the_answer_is_torn(wire):
    for cut in range(len(THREE) + 1):
        results, buffers = fetched(wire, THREE, [len(CONTENT), 8, 6], [cut, cut + 1])
        assert isinstance(results[0], Head), cut
        assert results[1:] == [Outcome.ABSENT, Outcome.NOT_TRIED], cut
        assert buffers == [CONTENT, bytes([CANARY]) * 8, bytes([CANARY]) * 6], cut


@given(
    contents=st.lists(st.binary(max_size=300), max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
    room=st.integers(0, 9),
)
def test_any_values_in_any_pieces(contents, cuts, room):
    with Tape(b"".join(map(value, contents)), cuts) as tape:
        wholes = [memoryview(bytearray([CANARY]) * (len(c) + room)) for c in contents]
        results = fetch(Wire(tape, SERVER, 5.0), [Want(b"n", whole) for whole in wholes])
    assert [head.frame_nbytes for head in results] == [len(c) for c in contents]
    for whole, content in zip(wholes, contents, strict=True):
        assert bytes(whole) == content + bytes([CANARY]) * room


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_garbage_is_an_error_or_a_miss_and_stays_within_its_buffer(data, cuts):
    whole = bytearray([CANARY]) * 96
    with Tape(data, cuts) as tape:
        wire = Wire(tape, SERVER, 5.0)
        try:
            results = fetch(wire, [Want(b"n", memoryview(whole)[32:64])] * 2)
        except BackendUnavailable:
            results = []
    assert not any(isinstance(result, Head) for result in results)
    assert whole[:32] == whole[64:] == bytes([CANARY]) * 32


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (value(CONTENT)[:-1], "closed the connection"),
        (value(CONTENT)[:-12], "closed the connection"),
        (value(CONTENT)[:7], "closed the connection"),
        (b"", "closed the connection"),
        (value(CONTENT)[:-2] + b"xx", "longer than it had announced"),
        (b"+OK\r\n", "where a value was due"),
        (b":5\r\n", "where a value was due"),
        (b"$abc\r\n", "where a value was due"),
        (b"$\r\n", "where a value was due"),
        (b"$1\xb2\r\n", "where a value was due"),
        (b"$-2\r\n", "a value of -2 bytes"),
        (b"$99999999999\r\n", "a value of 99999999999 bytes"),
        (b"$" + b"9" * 5000 + b"\r\n", "an impossible length"),
        (b"*1\r\n$1\r\nx\r\n", "where a value was due"),
        (b"x" * 20_000, "a line without end"),
        (b"-LOADING Redis is loading\r\n", "LOADING"),
        (b"-ERR \xff\xfe\r\n", "ERR"),
        (value(CONTENT) + b"$-1\r\n", "more than was asked for"),
    ],
)
def test_what_is_no_value_ends_the_connection(wire, answer, says):
    with pytest.raises(BackendUnavailable, match=says):
        fetched(wire, answer, [len(CONTENT)])


@pytest.mark.parametrize(
    ("answer", "size", "result"),
    [
        (value(CONTENT), len(CONTENT) - 1, Outcome.UNFIT),
        (bulk(b""), 8, Outcome.BROKEN),
        (bulk(b"short"), 8, Outcome.BROKEN),
        (bulk(bytes(200)), 200, Outcome.BROKEN),
        (bulk(value(CONTENT)[6:-3]), 600, Outcome.BROKEN),
        (bulk(value(CONTENT)[6:-2] + b"x"), 600, Outcome.BROKEN),
        (b"-WRONGTYPE Operation against a key\r\n", 8, Outcome.BROKEN),
    ],
)
def test_value_that_is_not_ours_or_does_not_fit_is_skipped_whole(wire, answer, size, result):
    results, buffers = fetched(wire, answer + value(b"next"), [size, 4])
    assert results == [result, Outcome.NOT_TRIED]
    assert set(buffers[0] + buffers[1]) == {CANARY}


@pytest.mark.parametrize("cut", range(12))
def test_part_of_another_length_is_broken(wire, cut):
    buffer = memoryview(bytearray(5))
    one = wire(bulk(b"12345") + bulk(b"1234"), [cut])
    wants = [Want(b"n", buffer, headed=False), Want(b"m", memoryview(bytearray(5)), headed=False)]
    assert fetch(one, wants) == [Outcome.DONE, Outcome.BROKEN]
    assert bytes(buffer) == b"12345"


@pytest.mark.parametrize(
    ("alone", "size", "ahead"),
    [
        (True, 3 << 20, 2),
        (True, 300 << 10, 5),
        (True, 1000, 9),
        (False, 3 << 20, 1),
        (False, 300 << 10, 4),
        (False, 1000, 9),
    ],
)
def test_small_values_are_asked_for_ahead_and_large_ones_when_the_one_before_begins(
    wire, alone, size, ahead
):
    one = wire(value(bytes(size)) * 9)
    one.alone = lambda: alone
    asked = []  # how often, before the bytes of each value arrive
    receive = one.into

    def into(view):
        if len(view) == size:
            asked.append(one._sock.sent.count(b"GET"))
        receive(view)

    one.into = into
    wants = [Want(b"n", memoryview(bytearray(size))) for _ in range(9)]
    assert all(isinstance(result, Head) for result in fetch(one, wants))
    assert asked == [min(9, number + ahead) for number in range(9)]


def test_behind_a_value_that_is_absent_nothing_more_is_asked_for(wire):
    size = 2 << 20
    one = wire(value(bytes(size)) + b"$-1\r\n")
    wants = [Want(b"n", memoryview(bytearray(size))) for _ in range(4)]
    results = fetch(one, wants)
    assert results[1:] == [Outcome.ABSENT, Outcome.NOT_TRIED, Outcome.NOT_TRIED]
    assert one._sock.sent.count(b"GET") == 2
    one.done()


@given(
    sizes=st.lists(st.integers(1, 800_000), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 1_600_000), max_size=8),
    damaged=st.none() | st.integers(0, 20_000),
)
@example(sizes=[700_000, 700_000], cuts=[], damaged=None)
@settings(max_examples=20)
def test_frames_are_hashed_as_they_arrive(sizes, cuts, damaged):
    header = [FrameHeader(1, size, bytes(16), BlockKey(bytes([size % 251] * 32))) for size in sizes]
    frames = [torch.ones(frame_nbytes(size), dtype=torch.uint8) for size in sizes]
    for data, one in zip(frames, header, strict=True):
        frame.seal(data, one)
    if damaged is not None:
        frames[0][damaged % (HEADER_NBYTES + sizes[0])] ^= 1
    into = [torch.zeros_like(data) for data in frames]
    taken = [FrameChecksum(data) for data in into]
    with Tape(b"".join(value(data.numpy().tobytes()) for data in frames), cuts) as tape:
        pairs = zip(into, taken, strict=True)
        wants = [Want(b"n", data.numpy().data, checksum=checksum) for data, checksum in pairs]
        fetch(Wire(tape, SERVER, 5.0), wants)
    for number, (data, one, checksum) in enumerate(zip(into, header, taken, strict=True)):
        if number == 0 and damaged is not None:
            with pytest.raises(BadFrame):
                frame.check(data, one.key, None, checksum)
        else:
            assert checksum.left_nbytes == 0
            assert frame.check(data, one.key, None, checksum) == one


REPLIES = b"+OK\r\n:42\r\n-ERR no\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n$1\r\n0\r\n*1\r\n$1\r\nk\r\n"


def test_small_answers_come_whole_wherever_they_are_torn(wire):
    for cut in range(len(REPLIES)):
        one = wire(REPLIES, [cut])
        ok, number, error, data, nothing, listed = ask(one, [Ask(b"k", b"PING\r\n")] * 6)
        one.done()
        assert (ok, number, data, nothing, listed) == (b"OK", 42, b"a\r\n", None, [b"0", [b"k"]])
        assert isinstance(error, hiredis.ReplyError)


@pytest.mark.parametrize(
    "answer",
    [b"garbage\r\n", b"$5\r\nab", b"", b"%1\r\n*0\r\n:1\r\n", b"*1\r\n" * 20, b"$-7\r\n"],
)
def test_small_answers_that_make_no_sense_are_an_error(wire, answer):
    with pytest.raises(BackendUnavailable):
        ask(wire(answer), [Ask(b"k", b"PING\r\n")])


def test_small_answer_without_end_is_given_up_before_it_fills_the_memory(wire, monkeypatch):
    monkeypatch.setattr(redis_wire, "_MAX_REPLIES_NBYTES", 100_000)
    assert ask(wire(bulk(bytes(99_000))), [Ask(b"k", b"x")]) == [bytes(99_000)]
    for answer in (b"$99999999\r\n" + bytes(200_000), b"*999999\r\n" + b":1\r\n" * 50_000):
        with pytest.raises(BackendUnavailable, match="small answers without end"):
            ask(wire(answer), [Ask(b"k", b"x")])


@pytest.mark.parametrize("kind", [b"*", b"%", b"~", b">", b"|"])
def test_list_of_millions_is_given_up_before_there_is_room_for_it(wire, kind):
    huge = b"+OK\r\n*2\r\n:1\r\n" + kind + b"4000000000\r\n"
    for cuts in [[], *([n] for n in range(len(huge))), range(len(huge))]:
        with pytest.raises(BackendUnavailable, match="a list of millions"):
            ask(wire(huge, cuts), [Ask(b"k", b"x")] * 2)
    one = wire(b"+OK\r\n" + kind + b"4000000000\r\n", [7])  # it begins in the answer before
    ask(one, [Ask(b"k", b"x")])
    with pytest.raises(BackendUnavailable, match="a list of millions"):
        ask(one, [Ask(b"k", b"x")])


def test_answer_nobody_asked_for_is_noticed(wire):
    one = wire(b"+OK\r\n+OK\r\n")
    ask(one, [Ask(b"k", b"PING\r\n")])
    with pytest.raises(BackendUnavailable, match="more than was asked"):
        one.done()


@pytest.mark.parametrize(
    ("error", "redirect"),
    [
        (b"-MOVED 3999 10.0.0.1:6381\r\n", Redirect(3999, Address("10.0.0.1", 6381), False)),
        (b"-ASK 3999 ::1:6381\r\n", Redirect(3999, Address("::1", 6381), True)),
        (b"-MOVED 1 :7000\r\n", Redirect(1, Address("here", 7000), False)),
    ],
)
def test_redirects_name_the_server(wire, error, redirect):
    assert ask(wire(error), [Ask(b"k", b"x")]) == [redirect]
    assert put(wire(error), [Put(b"k", (b"x",))]) == [redirect]
    assert fetched(wire, error, [4])[0] == [redirect]


@pytest.mark.parametrize(
    "words",
    [b"MOVED", b"MOVED 1", b"MOVED 1 here", b"ASK 1 h:%d" % 10**5, b"MOVED %s h:1" % (b"9" * 5000)],
)
def test_redirect_to_nowhere_is_an_error(wire, words):
    (answer,) = ask(wire(b"-%s\r\n" % words), [Ask(b"k", b"x")])
    assert isinstance(answer, hiredis.ReplyError)
    with pytest.raises(BackendUnavailable, match="the server says"):
        fetched(wire, b"-%s\r\n" % words, [4])


def test_asking_precedes_each_command_where_a_slot_is_on_its_way(wire):
    one = wire(b"+OK\r\n" + value(b"1234"))
    results = fetch(one, [Want(b"n", memoryview(bytearray(4)))], asking=True)
    assert isinstance(results[0], Head)
    assert one._sock.sent.startswith(command(b"ASKING"))
    one = wire(b"+OK\r\n+OK\r\n" * 2)
    assert put(one, [Put(b"k", (b"x",))] * 2, asking=True) == [Outcome.DONE] * 2
    assert ask(wire(b"+OK\r\n:1\r\n"), [Ask(b"k", b"x")], asking=True) == [1]


def test_value_is_sent_in_one_piece_with_its_options(wire):
    one = wire(b"+OK\r\n")
    data = bytes(range(256)) * 10
    kept = Put(b"name", (b"head", memoryview(data)), ttl_ms=1500, replace=False)
    assert put(one, [kept]) == [Outcome.DONE]
    assert one._sock.sent == command(b"SET", b"name", b"head" + data, b"NX", b"PX", b"1500")


def test_nothing_more_is_sent_after_a_refusal_was_heard(wire):
    big = bytes(5 << 20)
    one = wire(b"-OOM command not allowed\r\n")
    results = put(one, [Put(b"a", (big,)), Put(b"b", (big,)), Put(b"c", (big,))])
    assert results == [
        Refused("OOM command not allowed", SERVER),
        Outcome.NOT_TRIED,
        Outcome.NOT_TRIED,
    ]
    assert one._sock.sent.count(b"SET") == 1


def test_block_that_is_there_is_not_sent(wire):
    there = Head(0, 5, 5, b"nonce678", 1.0).pack()
    parted = Head(0, 5 << 20, 2 << 20, b"nonce678", 1.0).pack()
    one = wire(bulk(there) + bulk(b"") + bulk(b"junk") + bulk(parted) + b"+OK\r\n")
    puts = [Put(b"%d" % n, (b"x",), look_first=True) for n in range(4)]
    assert put(one, puts) == [
        Outcome.THERE, Outcome.DONE, Outcome.BROKEN, Outcome.BROKEN,
    ]  # fmt: skip
    assert one._sock.sent.count(b"SET") == 1
