"""Published bytes over TCP: sent from their memory, with digests that were computed before.

No digest outlives its lease, and no byte counts that has another digest.
"""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
import torch
from peer_process import MiB, pattern

from kvconnect.errors import PullFailed
from kvconnect.transfer.reads import RUN, Reads, runs
from kvconnect.transfer.regions import Regions
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp import handshake, kept_digests, wire
from kvconnect.transfer.tcp.kept_digests import KeptDigests, Leading
from kvconnect.transfer.tcp.stream import Stream

PIECE = 64 << 10
ORDER = np.random.default_rng(3).permutation(16)


def reads(epoch, order=ORDER):
    return Reads(0, order * PIECE, 0, np.arange(len(order)) * PIECE, PIECE, epoch)


def digested(transport):
    """Blocks until the digests that were asked for are computed."""
    transport._kept._worker.submit(int).result(60)


class Pair:
    """A source with 1 MiB of memory, and a reader of it."""

    def __init__(self, transport_of):
        self.source, self.reader = transport_of("tcp"), transport_of("tcp")
        self.had = torch.from_numpy(pattern(1, MiB))
        self.got = torch.zeros(MiB, dtype=torch.uint8)
        self.source.register(self.had)
        self.reader.register(self.got)
        self.handle = self.reader.connect(self.source.local())

    def keep(self, epoch, pieces=16):
        self.source.keep_digests(0, np.arange(pieces) * PIECE, PIECE, epoch=epoch)
        digested(self.source)

    def pull(self, epoch, order=ORDER):
        self.got.zero_()
        self.reader.pull(self.handle, reads(epoch, order), deadline_s=60).done.result()
        return self.got[: len(order) * PIECE]

    def wanted(self, order=ORDER):
        return self.had.reshape(16, -1)[torch.from_numpy(order)].reshape(-1)


@pytest.fixture
def pair(transport_of):
    return Pair(transport_of)


@pytest.fixture
def sent(monkeypatch):
    """How bytes were sent: ``send`` with a copy, ``send_digested`` without."""
    calls = []

    def record(name):
        plain = getattr(Stream, name)

        def recorded(self, region, runs, *rest):
            calls.append((name, int(runs["nbytes"].sum())))
            plain(self, region, runs, *rest)

        monkeypatch.setattr(Stream, name, recorded)

    record("send")
    record("send_digested")
    return calls


def test_published_pieces_are_sent_without_a_copy(pair, sent):
    pair.keep(epoch=5)
    assert torch.equal(pair.pull(epoch=5), pair.wanted())
    assert sent == [("send_digested", MiB)]


def test_what_was_not_published_is_copied(pair, sent):
    pair.keep(epoch=5, pieces=8)
    order = np.array([3, 1, 9, 2])
    assert torch.equal(pair.pull(5, order), pair.wanted(order))
    assert sent == [("send_digested", 2 * PIECE), ("send", 2 * PIECE)]
    for epoch in (0, 4):  # without a lease, or under another one
        del sent[:]
        assert torch.equal(pair.pull(epoch), pair.wanted())
        assert sent == [("send", MiB)]


def test_bytes_that_were_written_after_their_digest_are_refused(pair):
    pair.keep(epoch=5)
    pair.had[ORDER[7] * PIECE + 1000] ^= 4
    with pytest.raises(PullFailed, match="not those that were published") as refused:
        pair.pull(epoch=5)
    assert refused.value.reason == "corrupt"
    assert torch.equal(pair.pull(epoch=6), pair.wanted())  # another connection


def test_a_block_of_a_later_prompt_never_has_the_digest_of_an_earlier_one(pair, sent):
    pair.keep(epoch=5)
    pair.source.drop_digests(5)
    pair.had.add_(1)
    assert torch.equal(pair.pull(epoch=5), pair.wanted())
    pair.keep(epoch=6)
    for epoch, way in ((5, "send"), (6, "send_digested")):
        del sent[:]
        assert torch.equal(pair.pull(epoch), pair.wanted())
        assert sent == [(way, MiB)]


def test_a_block_that_is_used_again_is_right_even_if_its_first_lease_was_not_ended(pair, sent):
    pair.keep(epoch=5)
    pair.had.add_(1)
    pair.keep(epoch=6, pieces=8)
    order = np.array([3, 1, 9, 2])
    assert torch.equal(pair.pull(6, order), pair.wanted(order))
    assert sent == [("send_digested", 2 * PIECE), ("send", 2 * PIECE)]
    del sent[:]
    assert torch.equal(pair.pull(5, order[:2]), pair.wanted(order[:2]))
    assert sent == [("send", 2 * PIECE)]


def test_a_digest_that_is_late_is_not_kept(pair, monkeypatch):
    """The lease ends while its pieces are digested."""
    reached, go_on = threading.Event(), threading.Event()
    digest = kept_digests.xxh3_64_intdigest

    def late(data):
        found = digest(data)
        reached.set()
        assert go_on.wait(60)
        return found

    monkeypatch.setattr(kept_digests, "xxh3_64_intdigest", late)
    pair.source.keep_digests(0, np.arange(16) * PIECE, PIECE, epoch=5)
    assert reached.wait(60)
    pair.source.drop_digests(5)
    go_on.set()
    digested(pair.source)
    for table in pair.source._kept._tables.values():
        assert not table.epochs.any()
    pair.had.add_(1)
    assert torch.equal(pair.pull(epoch=5), pair.wanted())


def test_close_waits_for_the_thread_that_digests(pair, monkeypatch):
    reached = threading.Event()
    digest = kept_digests.xxh3_64_intdigest
    ended = []

    def slow(data):
        reached.set()
        found = digest(data)
        ended.append(found)
        return found

    monkeypatch.setattr(kept_digests, "xxh3_64_intdigest", slow)
    pair.source.keep_digests(0, np.arange(16) * PIECE, PIECE, epoch=5)
    assert reached.wait(60)
    pair.source.close()
    count = len(ended)
    assert not any("kvconnect-tcp-digests" in one.name for one in threading.enumerate())
    pair.source.keep_digests(0, np.arange(16) * PIECE, PIECE, epoch=6)  # does nothing
    digested(pair.source)
    assert len(ended) == count


def test_what_is_published_while_the_transport_closes_is_not_digested(pair, monkeypatch):
    kept = pair.source._kept
    every, close, locked = Regions.all, KeptDigests.close, []

    def seen(self):
        locked.append(kept._lock.locked())
        return every(self)

    def closed(self):
        close(self)
        pair.source.keep_digests(0, np.arange(16) * PIECE, PIECE, epoch=5)

    monkeypatch.setattr(Regions, "all", seen)
    monkeypatch.setattr(KeptDigests, "close", closed)
    pair.source.close()
    assert locked == [True]  # else `close` may run to its end before the digests are asked for
    assert not kept._live
    assert not any("kvconnect-tcp-digests" in one.name for one in threading.enumerate())


def test_the_memory_of_a_device_goes_through_a_buffer_on_either_side(pair, sent):
    pair.keep(epoch=5)
    object.__setattr__(pair.reader._regions[0], "host", False)
    assert torch.equal(pair.pull(epoch=5), pair.wanted())
    assert sent == [("send_digested", MiB)]
    object.__setattr__(pair.source._regions[0], "host", False)
    pair.keep(epoch=6)
    assert torch.equal(pair.pull(epoch=6), pair.wanted())
    assert sent[1:] == [("send", MiB)]


@pytest.mark.parametrize(
    ("nbytes", "cell"),
    [
        (16384, 16384),
        (16383, 0),
        (262144, 262144),
        (917504, 229376),
        (262147, 0),
        (1 << 21, 1 << 18),
    ],
)
def test_a_cell_divides_a_piece(nbytes, cell):
    assert kept_digests._cell_of(nbytes) == cell


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_cells_may_land_in_any_runs(pair, pieces):
    """A run holds several cells, one, or half of one."""
    pair.source.keep_digests(0, np.arange(8) * 16384, 16384, epoch=5)
    digested(pair.source)
    size = 65536 // pieces
    there, here = np.arange(pieces) * size, np.arange(pieces) * (size + 1001)
    pair.reader.pull(pair.handle, Reads(0, there, 0, here, size, 5), deadline_s=60).done.result()
    for far, near in zip(there.tolist(), here.tolist(), strict=True):
        assert torch.equal(pair.got[near : near + size], pair.had[far : far + size])


def test_cells_are_found_in_any_runs():
    memory = torch.from_numpy(pattern(1, MiB))
    regions = Regions()
    regions.add(memory)
    kept = KeptDigests(regions)
    kept.keep(0, np.arange(64) * 16384, 16384, 5)
    kept._worker.submit(int).result(60)
    order = np.random.default_rng(1).permutation(64)
    found = kept.leading(0, runs(order * 16384, 16384), 5)
    cells = memory.reshape(64, -1).numpy()
    expected = [kept_digests.xxh3_64_intdigest(cells[one].data) for one in order]
    assert found.cell == 16384
    assert found.digests.tolist() == expected
    broken = np.array([(16384, 32768), (65536, 16385), (0, 16384)], RUN)
    assert kept.leading(0, broken, 5).nbytes == 32768
    assert kept.leading(0, broken[1:], 5).nbytes == 0
    kept.close()


def test_a_request_for_the_same_bytes_again_and_again_costs_bounded_memory(monkeypatch):
    monkeypatch.setattr(kept_digests, "MAX_CELLS", 100)
    regions = Regions()
    regions.add(torch.zeros(MiB, dtype=torch.uint8))
    kept = KeptDigests(regions)
    kept.keep(0, np.arange(64) * 16384, 16384, 5)
    kept._worker.submit(int).result(60)
    assert len(kept.leading(0, np.array([(0, MiB)] * 1000, RUN), 5).digests) == 100
    kept.close()


# ------------------------------------------------------------------------------- on the way

SECRET = "correct horse battery staple"


class Ends:
    """Both ends of a connection, with a request of the reader that the source has received."""

    def __init__(self, secret):
        self.here, self.there = socket.socketpair()
        self.reader, self.source = (handshake._seals(secret, b"n" * 32, b"m" * 32) for _ in "ab")
        self.ask()

    def ask(self, epoch=5):
        wanted = runs(np.arange(8) * PIECE, PIECE)
        self.asked = wire.send_request(self.here, self.reader.requests, 0, wanted, epoch=epoch)
        self.received = wire.receive_request(self.there, self.source.requests)

    def close(self):
        self.here.close()
        self.there.close()


@pytest.fixture(params=[None, SharedSecret(SECRET)], ids=["no secret", "secret"])
def ends(request):
    made = Ends(request.param)
    yield made
    made.close()


FOUR = Leading(PIECE, np.arange(4, dtype=np.uint64))


def test_digests_arrive_as_they_were_sent(ends):
    wire.send_answer(ends.there, ends.source.answers, ends.received, FOUR)
    leading = wire.receive_answer(ends.here, ends.reader.answers, ends.asked)
    assert (leading.cell, leading.digests.tolist()) == (PIECE, [0, 1, 2, 3])


@pytest.mark.parametrize(
    "leading",
    [
        Leading(PIECE, np.arange(9, dtype=np.uint64)),
        Leading(8192, np.arange(4, dtype=np.uint64)),
        Leading((1 << 18) + 1, np.arange(1, dtype=np.uint64)),
    ],
    ids=["more than the bytes", "small cells", "a large cell"],
)
def test_digests_of_other_bytes_than_follow_are_malformed(ends, leading):
    wire.send_answer(ends.there, ends.source.answers, ends.received, leading)
    with pytest.raises(wire.Malformed, match="digests of"):
        wire.receive_answer(ends.here, ends.reader.answers, ends.asked)


def test_digests_of_another_lease_have_another_code(ends):
    """Even where the answer's place on the connection is right."""
    first = ends.received
    ends.ask(epoch=6)
    wire.send_answer(ends.there, ends.source.answers, first, FOUR)
    with pytest.raises(wire.Malformed, match="digests of an answer have another code"):
        wire.receive_answer(ends.here, ends.reader.answers, ends.asked)
