"""Peers that die, freeze and restart while they are read from, as processes."""

from __future__ import annotations

import signal
import time

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


@kinds
def test_a_peer_killed_while_it_is_read_from(pair):
    pull = pair.pull(NBYTES, BOUND_S)
    pair.wait_until_some_bytes_are_there()
    pair.peer.signal(signal.SIGKILL)
    assert reason_of(pull) == "peer"
    assert pull.terminal.wait(60)
    pair.put_canaries()
    pair.peer.process.join(60)
    with pytest.raises(PeerUnreachable):
        pair.reader.connect(pair.peer.local)
    assert pair.canaries_are_untouched()


@kinds
def test_a_frozen_peer_is_seen_by_the_deadline(pair):
    pair.peer.freeze()
    started = time.monotonic()
    pull = pair.pull(NBYTES, 1.0)
    assert reason_of(pull) == "deadline"
    assert 0.9 < time.monotonic() - started < BOUND_S
    pair.peer.wake()
    assert pull.terminal.wait(BOUND_S)
    pair.put_canaries()
    pair.peer.ask("local")
    pair.read_a_little()
    assert pair.canaries_are_untouched()


@kinds
def test_a_peer_frozen_mid_read_writes_nothing_after_a_rebuild(pair):
    pull = pair.pull(NBYTES, 2.0)
    pair.wait_until_some_bytes_are_there()
    pair.peer.freeze()
    if not pull.done.done() or pull.done.exception():
        assert reason_of(pull) == "deadline"
    pair.reader.rebuild()
    assert pull.terminal.is_set()
    pair.put_canaries()
    pair.peer.wake()
    again = pair.reader.pull(pair.handle, Reads(0, [0], pair.into, [0], 1), deadline_s=BOUND_S)
    assert reason_of(again) == "peer"
    pair.peer.process.join(0.5)  # UCX aborts some; either way the bytes stay
    assert pair.canaries_are_untouched()


@kinds
def test_an_abandoned_pull_fails_at_once_and_is_terminal_later(pair):
    pair.peer.freeze()
    pull = pair.pull(NBYTES, BOUND_S)
    pull.abandon()
    pull.abandon()
    assert reason_of(pull) == "abandoned"
    pair.peer.wake()
    assert pull.terminal.wait(BOUND_S)
    pair.put_canaries()
    pair.read_a_little()
    assert pair.canaries_are_untouched()


@kinds
def test_a_disconnect_fails_what_is_under_way(pair):
    pair.peer.freeze()
    pull = pair.pull(NBYTES, BOUND_S)
    pair.reader.disconnect(pair.handle)
    assert reason_of(pull) == "peer"
    pair.peer.wake()
    assert pull.terminal.wait(BOUND_S)
    pair.handle = pair.reader.connect(pair.peer.local)
    pair.read_a_little()


@kinds
def test_a_peer_that_restarted_is_another_incarnation(pair, kind, peer_of):
    pair.peer.end()
    settings = {}
    if kind == "tcp":
        import json

        settings["port"] = json.loads(pair.peer.local)["port"]
    new = peer_of(kind, seeds=[(1, NBYTES)], identity="peer", **settings)
    stale, stale_handle = pair.pull(NBYTES, BOUND_S), pair.handle
    assert reason_of(stale) == "peer"
    pair.handle = pair.reader.connect(new.local)
    assert pair.handle.incarnation != stale_handle.incarnation
    pair.read_a_little()
    pull = pair.reader.pull(stale_handle, Reads(0, [0], pair.into, [0], 1), deadline_s=60)
    assert reason_of(pull) == "peer"


@kinds
def test_after_a_rebuild_of_either_side_both_connect_again(pair):
    pair.read_a_little()
    pair.reader.rebuild()
    pair.handle = pair.reader.connect(pair.peer.local)
    pair.read_a_little()
    again = pair.peer.ask("rebuild")
    assert reason_of(pair.pull(NBYTES, BOUND_S)) == "peer"
    pair.handle = pair.reader.connect(again)
    pair.read_a_little()


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
