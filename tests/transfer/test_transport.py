"""What every transport does, with a peer in another process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_process import MiB, PeerProcess, make_transport, pattern

from kvconnect.errors import ConfigurationError, UsageError
from kvconnect.transfer.transport import PeerUnreachable, PullFailed, Reads

CANARY = 0xA5


@pytest.fixture
def reader(transport_of, kind):
    return transport_of(kind, identity="reader")


def destination(transport, nbytes):
    memory = torch.full((nbytes,), CANARY, dtype=torch.uint8)
    return memory, transport.register(memory)


def reads_of(region, nbytes, into, piece=None):
    offsets = np.arange(0, nbytes, piece or nbytes)
    return Reads(region, offsets, into, offsets, piece or nbytes)


def test_what_is_read_is_what_the_peer_has(reader, peer_of, kind):
    peer = peer_of(kind, seeds=[(1, MiB), (2, 3 * MiB)])
    memory, into = destination(reader, 4 * MiB)
    handle = reader.connect(peer.local)
    assert handle.regions == (MiB, 3 * MiB)
    reads = Reads(1, np.array([MiB, 0, 2 * MiB]), into, np.array([0, 3 * MiB, MiB]), MiB)
    pull = reader.pull(handle, reads, deadline_s=60)
    pull.done.result()
    assert pull.terminal.is_set()
    had = pattern(2, 3 * MiB)
    assert np.array_equal(memory[:MiB], had[MiB : 2 * MiB])
    assert np.array_equal(memory[3 * MiB :], had[:MiB])
    assert np.array_equal(memory[MiB : 2 * MiB], had[2 * MiB :])
    assert (memory[2 * MiB : 3 * MiB] == CANARY).all()


def test_no_reads_are_done_at_once(reader, peer_of, kind):
    _, into = destination(reader, 16)
    none = np.empty(0, np.int64)
    pull = reader.pull(
        reader.connect(peer_of(kind).local), Reads(0, none, into, none, 16), deadline_s=60
    )
    pull.done.result(60)
    assert pull.terminal.is_set()


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def pair(request):
    """A transport and a peer that many examples share."""
    transport, peer = make_transport(request.param), PeerProcess(request.param, seeds=[(3, 70_000)])
    transport.open()
    memory, into = destination(transport, 70_000)
    yield transport, transport.connect(peer.local), memory, into
    transport.close()
    peer.end()


@st.composite
def pieces(draw, size=70_000):
    nbytes = draw(st.integers(1, 3000))
    slots = draw(st.lists(st.integers(0, size // nbytes - 1), min_size=1, max_size=40, unique=True))
    shift = draw(st.integers(0, size % nbytes))
    remote = draw(st.lists(st.integers(0, size - nbytes), min_size=len(slots), max_size=len(slots)))
    if draw(st.booleans()):  # neighbours on both sides
        remote, slots = [slot * nbytes for slot in sorted(slots)], sorted(slots)
    return nbytes, np.array(remote), np.array(slots) * nbytes + shift


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces())
def test_random_pieces_are_read_and_nothing_else_changes(pair, pieces):
    transport, peer, memory, into = pair
    nbytes, remote, local = pieces
    memory.fill_(CANARY)
    transport.pull(peer, Reads(0, remote, into, local, nbytes), deadline_s=60).done.result()
    expected = np.full(70_000, CANARY, np.uint8)
    had = pattern(3, 70_000)
    for far, near in zip(remote, local, strict=True):
        expected[near : near + nbytes] = had[far : far + nbytes]
    assert np.array_equal(memory, expected)


def test_many_pulls_at_once(reader, peer_of, kind):
    peer = peer_of(kind, seeds=[(4, 8 * MiB)])
    memory, into = destination(reader, 8 * MiB)
    handle = reader.connect(peer.local)
    order = np.random.default_rng(0).permutation(128)
    pulls = [
        reader.pull(
            handle,
            Reads(
                0,
                one * 65536 + np.arange(0, 65536, 4096),
                into,
                one * 65536 + np.arange(0, 65536, 4096),
                4096,
            ),
            deadline_s=60,
        )
        for one in order
    ]
    for pull in pulls:
        pull.done.result()
    assert np.array_equal(memory, pattern(4, 8 * MiB))


def test_both_may_read_from_each_other(reader, peer_of, kind):
    memory, into = destination(reader, MiB)
    peer = peer_of(kind)
    reader.pull(reader.connect(peer.local), reads_of(0, MiB, into), deadline_s=60).done.result()
    memory[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    there = peer.ask("pull", reader.local(), [into, [0], 0, [MiB - 4], 4], 20.0)
    assert there == pattern(1, MiB)[:-4].tobytes() + bytes([1, 2, 3, 4])


def test_memory_that_the_peer_has_not_registered_is_refused(reader, pair_of_one):
    handle, into = pair_of_one
    for region, offset, nbytes in ((0, MiB, 1), (0, MiB - 15, 16), (1, 0, 16), (0, 0, MiB + 1)):
        pull = reader.pull(handle, Reads(region, [offset], into, [0], nbytes), deadline_s=60)
        with pytest.raises(PullFailed) as failed:
            pull.done.result(60)
        assert failed.value.reason == "refused"
        assert pull.terminal.is_set()


@pytest.fixture
def pair_of_one(reader, peer_of, kind):
    _, into = destination(reader, 2 * MiB)
    return reader.connect(peer_of(kind).local), into


def test_local_memory_that_is_not_registered_is_an_error_of_the_caller(reader, pair_of_one):
    handle, into = pair_of_one
    with pytest.raises(ConfigurationError, match="outside of region 0, which has 2097152"):
        reader.pull(handle, Reads(0, [0], into, [2 * MiB - 8], 16), deadline_s=60)
    with pytest.raises(ConfigurationError, match="region 7 is not registered"):
        reader.pull(handle, Reads(0, [0], 7, [0], 16), deadline_s=60)
    with pytest.raises(ConfigurationError, match="deadline_s=0"):
        reader.pull(handle, Reads(0, [0], into, [0], 16), deadline_s=0)


def test_memory_that_cannot_be_registered_is_refused(reader):
    with pytest.raises(ConfigurationError, match="only contiguous memory"):
        reader.register(torch.zeros(4, 4).t()[1:])
    with pytest.raises(ConfigurationError, match="at least one byte"):
        reader.register(torch.empty(0))
    assert reader.register(torch.zeros(2, 3, dtype=torch.bfloat16)) == 0


def test_a_transport_that_is_not_open_reads_nothing(kind):
    closed = make_transport(kind)
    with pytest.raises(UsageError):
        closed.local()
    with pytest.raises(UsageError):
        closed.connect(b"")
    closed.close()


@pytest.mark.parametrize("local", [b"", b"{}", b"\xff" * 100, b"[" * 5000])
def test_a_peer_that_tells_nonsense_is_unreachable(reader, local):
    with pytest.raises(PeerUnreachable, match="local"):
        reader.connect(local)


def test_a_disconnected_peer_fails_pulls(reader, pair_of_one):
    handle, into = pair_of_one
    reader.disconnect(handle)
    reader.disconnect(handle)
    pull = reader.pull(handle, Reads(0, [0], into, [0], 16), deadline_s=60)
    with pytest.raises(PullFailed, match="disconnected") as failed:
        pull.done.result(60)
    assert failed.value.reason == "peer"
    assert pull.terminal.wait(60)
