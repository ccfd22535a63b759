"""Many peers that die, freeze and wake at random: nothing wrong is accepted, nothing hangs."""

from __future__ import annotations

import random
import signal
import time

import numpy as np
import pytest
import torch
from peer_process import MiB, pattern

from kvconnect.transfer.transport import PeerUnreachable, PullFailed, Reads

NBYTES = 32 * MiB
DEADLINE_S = 0.5
CANARY = 0xA5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["tcp", "nixl", "nixl-tcp"])
def test_chaos(kind, transport_of, peer_of):
    chance = random.Random(7)
    reader = transport_of(kind, identity="reader")
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    into = reader.register(memory)
    offsets = np.arange(0, NBYTES, 65536)
    peer = peer_of(kind, seeds=[(1, NBYTES)], identity="peer")
    had = pattern(1, NBYTES)
    ended = {"whole": 0, "failed": 0}
    for _ in range(60):
        if not peer.process.is_alive():
            peer = peer_of(kind, seeds=[(1, NBYTES)], identity="peer")
        try:
            handle = reader.connect(peer.local)
        except PeerUnreachable:
            peer.end()
            continue
        memory.fill_(CANARY)
        started = time.monotonic()
        pull = reader.pull(handle, Reads(0, offsets, into, offsets, 65536), deadline_s=DEADLINE_S)
        settled = []
        pull.done.add_done_callback(lambda _, settled=settled: settled.append(time.monotonic()))
        time.sleep(chance.random() * 0.01)  # a moment of the read, not a condition
        event = chance.choice(["none", "kill", "freeze", "abandon", "rebuild", "disconnect"])
        if event == "kill":
            peer.signal(signal.SIGKILL)
        elif event == "freeze":
            peer.freeze()
        elif event == "abandon":
            pull.abandon()
        elif event == "rebuild":
            reader.rebuild()
        elif event == "disconnect":
            reader.disconnect(handle)
        try:
            pull.done.result(60)
        except PullFailed:
            ended["failed"] += 1
            assert settled[0] - started < 30, event
        else:
            ended["whole"] += 1
            assert np.array_equal(memory, had)
        if event == "freeze" and chance.random() < 0.5:
            reader.rebuild()
            assert pull.terminal.is_set()
            memory.fill_(CANARY)
        if event == "freeze":
            peer.wake()
        assert pull.terminal.wait(60)
        memory.fill_(CANARY)
        peer.process.join(0.05)
        assert bool((memory == CANARY).all())
    assert min(ended.values()) > 5
