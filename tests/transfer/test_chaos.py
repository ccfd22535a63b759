"""Many peers that die, freeze and wake at random: nothing wrong is accepted, nothing hangs."""

from __future__ import annotations

import random
import signal
import time

import numpy as np
import pytest
from canaries import Canaries
from peer_process import MiB, pattern

from kvconnect.transfer.transport import PeerUnreachable, PullFailed

NBYTES = 32 * MiB
DEADLINE_S = 0.5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["tcp", "nixl", "nixl-tcp"])
def test_chaos(kind, transport_of, peer_of):
    chance = random.Random(7)
    pair = Canaries(NBYTES, transport_of(kind, identity="reader"), new_peer(kind, peer_of))
    had = pattern(1, NBYTES)
    ended = {"whole": 0, "failed": 0}
    for _ in range(60):
        if not pair.peer.process.is_alive():
            pair.peer = new_peer(kind, peer_of)
        try:
            pair.handle = pair.reader.connect(pair.peer.local)
        except PeerUnreachable:
            pair.peer.end()
            continue
        pair.put_canaries()
        started = time.monotonic()
        pull = pair.pull(NBYTES, DEADLINE_S)
        settled = []
        pull.done.add_done_callback(lambda _, settled=settled: settled.append(time.monotonic()))
        time.sleep(chance.random() * 0.01)  # a moment of the read, not a condition
        event = chance.choice(["none", "kill", "freeze", "abandon", "rebuild", "disconnect"])
        if event == "kill":
            pair.peer.signal(signal.SIGKILL)
        elif event == "freeze":
            pair.peer.freeze()
        elif event == "abandon":
            pull.abandon()
        elif event == "rebuild":
            pair.reader.rebuild()
        elif event == "disconnect":
            pair.reader.disconnect(pair.handle)
        try:
            pull.done.result(60)
        except PullFailed:
            ended["failed"] += 1
            assert settled[0] - started < 30, event
        else:
            ended["whole"] += 1
            assert np.array_equal(pair.memory, had)
        if event == "freeze" and chance.random() < 0.5:
            pair.reader.rebuild()
            assert pull.terminal.is_set()
            pair.put_canaries()
        if event == "freeze":
            pair.peer.wake()
        assert pull.terminal.wait(60)
        pair.put_canaries()
        pair.peer.process.join(0.05)
        assert pair.canaries_are_untouched()
    assert min(ended.values()) > 5


def new_peer(kind, peer_of):
    return peer_of(kind, seeds=[(1, NBYTES)], identity="peer")
