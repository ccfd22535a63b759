"""Peers that die, freeze and restart while they are read from, as processes."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from canaries import BOUND_S, PIECE, Canaries
from peer_process import MiB, pattern

from kvconnect.transfer.transport import PeerUnreachable, PullFailed, Reads

NBYTES = 96 * MiB

kinds = pytest.mark.parametrize("kind", ["tcp", "nixl-tcp"])


@pytest.fixture
def pair(kind, transport_of, peer_of):
    peer = peer_of(kind, seeds=[(1, NBYTES)], identity="peer")
    return Canaries(NBYTES, transport_of(kind, identity="reader"), peer)


def reason_of(pull):
    """Returns why it failed."""
    with pytest.raises(PullFailed) as failed:
        pull.done.result(BOUND_S + 1)
    return failed.value.reason


def one_byte(pair, handle):
    return pair.reader.pull(handle, Reads(0, [0], pair.into, [0], 1), deadline_s=BOUND_S)


@kinds
def test_a_peer_killed_while_it_is_read_from_is_another_after_its_restart(pair, kind, peer_of):
    pull = pair.pull(NBYTES, BOUND_S)
    pair.wait_until_some_bytes_are_there()
    pair.peer.signal(signal.SIGKILL)
    assert reason_of(pull) == "peer"
    assert pull.terminal.wait(60)
    pair.put_canaries()
    pair.peer.process.join(60)
    with pytest.raises(PeerUnreachable):
        pair.reader.connect(pair.peer.local)

    settings = {"port": json.loads(pair.peer.local)["port"]} if kind == "tcp" else {}
    new = peer_of(kind, seeds=[(1, NBYTES)], identity="peer", **settings)
    former = pair.handle
    assert reason_of(pair.pull(NBYTES, BOUND_S)) == "peer"
    pair.handle = pair.reader.connect(new.local)
    assert pair.handle.incarnation != former.incarnation
    pair.read_a_little()
    assert reason_of(one_byte(pair, former)) == "peer"
    assert pair.canaries_are_untouched()


@kinds
def test_reads_of_a_frozen_peer_end_and_write_nothing_later(pair):
    for reason in ("deadline", "abandoned", "peer"):
        pair.peer.freeze()
        pull = pair.pull(NBYTES, 0.3 if reason == "deadline" else BOUND_S)
        if reason == "abandoned":
            pull.abandon()
            pull.abandon()
        elif reason == "peer":
            pair.reader.disconnect(pair.handle)
        assert reason_of(pull) == reason
        pair.peer.wake()
        assert pull.terminal.wait(BOUND_S)
        pair.put_canaries()
        if reason == "peer":
            pair.handle = pair.reader.connect(pair.peer.local)
        pair.read_a_little()
        assert pair.canaries_are_untouched()


@kinds
def test_after_a_rebuild_of_either_side_both_connect_and_no_earlier_read_writes(pair):
    pair.read_a_little()
    pair.reader.rebuild()
    pair.handle = pair.reader.connect(pair.peer.local)
    pair.read_a_little()
    again = pair.peer.ask("rebuild")
    assert reason_of(pair.pull(NBYTES, BOUND_S)) == "peer"
    pair.handle = pair.reader.connect(again)
    pair.read_a_little()

    pair.put_canaries()
    pull = pair.pull(NBYTES, 1.0)
    pair.wait_until_some_bytes_are_there()
    pair.peer.freeze()
    if not pull.done.done() or pull.done.exception():
        assert reason_of(pull) == "deadline"
    pair.reader.rebuild()
    assert pull.terminal.is_set()
    pair.put_canaries()
    pair.peer.wake()
    assert reason_of(one_byte(pair, pair.handle)) == "peer"
    pair.peer.process.join(0.2)  # UCX aborts some; either way the bytes stay
    assert pair.canaries_are_untouched()


@pytest.mark.parametrize("kind", ["tcp", "nixl"])
def test_the_death_of_a_reader_mid_read_harms_no_other(kind, transport_of, peer_of):
    peer = peer_of(kind, seeds=[(1, NBYTES)])
    doomed = peer_of(kind, seeds=[(2, NBYTES)])
    offsets = np.arange(0, NBYTES, PIECE)
    doomed.ask("start_pull", peer.local, [0, offsets, 0, offsets, PIECE], BOUND_S)
    doomed.signal(signal.SIGKILL)
    Canaries(NBYTES, transport_of(kind), peer).read_a_little()


def test_shared_memory_of_a_killed_peer_is_read_whole_or_fails(transport_of, peer_of):
    pair = Canaries(NBYTES, transport_of("nixl"), peer_of("nixl", seeds=[(1, NBYTES)]))
    pull = pair.pull(NBYTES, BOUND_S)
    pair.wait_until_some_bytes_are_there()
    pair.peer.signal(signal.SIGKILL)
    if pull.done.exception(60) is None:
        assert np.array_equal(pair.memory, pattern(1, NBYTES))
    assert pull.terminal.wait(60)
