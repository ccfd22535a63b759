"""What every transport does, with a peer in another process."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_process import MiB, PeerProcess, make_transport, pattern

from kvconnect.errors import ConfigurationError, UsageError
from kvconnect.transfer.transport import PeerUnreachable, PullFailed, Reads

CANARY = 0xA5
SIZE = 70_000


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def pair(request):
    """A transport with a region, and a peer with three, which the tests share."""
    reader = make_transport(request.param, identity="reader")
    peer = PeerProcess(request.param, seeds=[(1, MiB), (3, SIZE), (5, 16)])
    reader.open()
    memory = torch.full((MiB,), CANARY, dtype=torch.uint8)
    into = reader.register(memory)
    handle = reader.connect(peer.local)
    yield SimpleNamespace(reader=reader, peer=peer, memory=memory, into=into, handle=handle)
    reader.close()
    peer.end()


def pull(pair, region, remote, local, nbytes, **more):
    reads = Reads(region, remote, more.pop("into", pair.into), local, nbytes)
    return pair.reader.pull(pair.handle, reads, deadline_s=more.pop("deadline_s", 60))


def reason_of(failed):
    with pytest.raises(PullFailed) as error:
        failed.done.result(60)
    assert failed.terminal.wait(60)
    return error.value.reason


@st.composite
def pieces(draw, size=SIZE):
    nbytes = draw(st.integers(1, 3000))
    slots = draw(st.lists(st.integers(0, size // nbytes - 1), min_size=1, max_size=40, unique=True))
    shift = draw(st.integers(0, size % nbytes))
    remote = draw(st.lists(st.integers(0, size - nbytes), min_size=len(slots), max_size=len(slots)))
    if draw(st.booleans()):  # neighbours on both sides
        remote, slots = [slot * nbytes for slot in sorted(slots)], sorted(slots)
    return nbytes, np.array(remote), np.array(slots) * nbytes + shift


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces())
def test_random_pieces_are_read_and_nothing_else_changes(pair, pieces):
    assert pair.handle.regions == (MiB, SIZE, 16)
    nbytes, remote, local = pieces
    pair.memory.fill_(CANARY)
    ended = pull(pair, 1, remote, local, nbytes)
    ended.done.result()
    assert ended.terminal.is_set()
    expected = np.full(MiB, CANARY, np.uint8)
    had = pattern(3, SIZE)
    for far, near in zip(remote, local, strict=True):
        expected[near : near + nbytes] = had[far : far + nbytes]
    assert np.array_equal(pair.memory, expected)


def test_no_reads_are_done_at_once(pair):
    none = np.empty(0, np.int64)
    ended = pull(pair, 0, none, none, 16)
    ended.done.result(60)
    assert ended.terminal.is_set()


def test_many_pulls_at_once(pair):
    order = np.random.default_rng(0).permutation(128)
    within = np.arange(0, 8192, 512)
    for each in [pull(pair, 0, one * 8192 + within, one * 8192 + within, 512) for one in order]:
        each.done.result()
    assert np.array_equal(pair.memory, pattern(1, MiB))


def test_both_may_read_from_each_other(pair):
    pair.memory[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    there = pair.peer.ask("pull", pair.reader.local(), [pair.into, [0], 2, [12], 4], 20.0)
    assert there == pattern(5, 16)[:-4].tobytes() + bytes([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("region", "offset", "nbytes"), [(0, MiB, 1), (0, MiB - 15, 16), (3, 0, 16), (0, 0, MiB + 1)]
)
def test_memory_that_the_peer_has_not_registered_is_refused(pair, region, offset, nbytes):
    into = pair.reader.register(torch.empty(2 * MiB, dtype=torch.uint8))
    assert reason_of(pull(pair, region, [offset], [0], nbytes, into=into)) == "refused"


@pytest.mark.parametrize(
    ("local", "changed", "message"),
    [
        (MiB - 8, {}, "outside of region 0, which has 1048576"),
        (0, {"into": 77}, "region 77 is not registered"),
        (0, {"deadline_s": 0}, "deadline_s=0"),
    ],
)
def test_local_memory_that_is_not_registered_is_an_error_of_the_caller(
    pair, local, changed, message
):
    with pytest.raises(ConfigurationError, match=message):
        pull(pair, 0, [0], [local], 16, **changed)


@pytest.mark.parametrize("local", [b"", b"{}", b"\xff" * 100, b"[" * 5000])
def test_a_peer_that_tells_nonsense_is_unreachable(pair, local):
    with pytest.raises(PeerUnreachable, match="local"):
        pair.reader.connect(local)


def test_a_disconnected_peer_fails_pulls(pair):
    pair.reader.disconnect(pair.handle)
    pair.reader.disconnect(pair.handle)
    assert reason_of(pull(pair, 0, [0], [0], 16)) == "peer"
    pair.handle = pair.reader.connect(pair.peer.local)
    pull(pair, 0, [0], [0], 16).done.result(60)


def test_memory_that_cannot_be_registered_is_refused(kind):
    transport = make_transport(kind)
    with pytest.raises(ConfigurationError, match="only contiguous memory"):
        transport.register(torch.zeros(4, 4).t()[1:])
    with pytest.raises(ConfigurationError, match="at least one byte"):
        transport.register(torch.empty(0))
    assert transport.register(torch.zeros(2, 3, dtype=torch.bfloat16)) == 0
    transport.close()


def test_a_transport_that_is_not_open_reads_nothing(kind):
    closed = make_transport(kind)
    with pytest.raises(UsageError):
        closed.local()
    with pytest.raises(UsageError):
        closed.connect(b"")
    closed.close()
