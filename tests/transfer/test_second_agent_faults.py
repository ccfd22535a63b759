"""Peers that freeze or die before NIXL's second agent ever read from them, as processes."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from canaries import PIECE, Canaries
from peer_process import MiB, pattern

from kvconnect.transfer.nixl import transport as nixl_transport
from kvconnect.transfer.nixl.agent import Agent

NBYTES = 48 * MiB
DEADLINE_S = 0.5
PATIENT_S = 60.0  # of reads that do not end by their deadline


@pytest.fixture
def pair(transport_of, peer_of, monkeypatch):
    monkeypatch.setattr(nixl_transport, "_cores", lambda: 2)
    peer = peer_of("nixl", seeds=[(1, NBYTES)], identity="peer")
    return Canaries(NBYTES, transport_of("nixl", identity="reader"), peer)


@pytest.fixture
def second_reads(pair, monkeypatch):
    """The first agent begins nothing of a large pull before the second one has; says when."""
    begin, has_begun = Agent.begin, threading.Event()

    def beside(agent, transfer):
        if agent is pair.reader._second._agent:
            has_begun.set()
        elif pair.large:
            assert has_begun.wait(60)
        return begin(agent, transfer)

    monkeypatch.setattr(Agent, "begin", beside)
    return has_begun


def outcome(pull):
    """Its error, if any; it ends in time."""
    started = time.monotonic()
    try:
        return pull.done.exception(60)
    finally:
        assert time.monotonic() - started < 30


def test_a_peer_that_froze_before_the_second_agent_read_from_it(pair, second_reads):
    pair.read_a_little()
    pair.peer.freeze()
    pull = pair.pull(NBYTES, DEADLINE_S)
    assert outcome(pull).reason == "deadline"
    assert second_reads.is_set()
    pair.reader.rebuild()
    assert pull.terminal.is_set()
    pair.put_canaries()
    pair.peer.wake()
    pair.handle = pair.reader.connect(pair.peer.ask("local"))
    assert pair.canaries_are_untouched()
    for nbytes in (NBYTES, PIECE):  # the second agent is a new one, and has no part of a piece
        second_reads.clear()
        pair.peer.freeze()
        pull = pair.pull(nbytes, DEADLINE_S)
        error = outcome(pull)
        assert second_reads.is_set() == pair.large
        if error is None:
            assert np.array_equal(pair.memory[:nbytes], pattern(1, nbytes))
        else:
            assert error.reason == "deadline"
        pair.peer.wake()
        assert pull.terminal.wait(60)
        pair.put_canaries()
        pair.peer.ask("local")
        assert pair.canaries_are_untouched()
        pair.read_a_little()


def test_a_peer_killed_before_the_second_agent_read_from_it(pair):
    pair.peer.signal(signal.SIGKILL)
    pair.peer.process.join(60)
    pull = pair.pull(NBYTES, PATIENT_S)
    assert outcome(pull).reason == "peer"
    assert pull.terminal.wait(60)
    pair.put_canaries()
    assert outcome(pair.pull(NBYTES, PATIENT_S)).reason == "peer"
    assert pair.canaries_are_untouched()
