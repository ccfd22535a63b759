"""Bytes on their way over TCP that are changed, or are those of another piece, request or lease.

Nothing of that is taken for what was asked for: the read fails, or it is done again and right.
"""

from __future__ import annotations

import json
import random
import socket
import threading

import numpy as np
import pytest
import torch
from peer_process import MiB, pattern
from tampering import TO_CLIENT, TO_SERVER, FlippedBit, Relay

from kvconnect.errors import PullFailed
from kvconnect.transfer.reads import RUN, Reads
from kvconnect.transfer.regions import Region
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp import handshake, stream
from kvconnect.transfer.tcp.stream import Corrupt, Stream
from kvconnect.transfer.tcp.wire import receive_request, send_request

SECRET = "correct horse battery staple"


# Blocks of 16 KiB in another order: 1 MiB of runs that do not follow each other.
PIECE = 16384
ORDER = np.random.default_rng(3).permutation(64)
READS = Reads(0, ORDER * PIECE, 0, np.arange(64) * PIECE, PIECE, epoch=5)
WANTED = pattern(1, MiB).reshape(64, -1)[ORDER].reshape(-1)
# The bytes of a request: its head, its runs and two codes.
REQUEST_NBYTES = 28 + 16 + 64 * 16 + 16
# Of an answer: its head with a code; the digests with theirs, if they are kept; then the bytes,
# with the sums of 4 pieces if not.
HEAD_NBYTES, DIGESTS_NBYTES = 24 + 16, 64 * 8 + 16


@pytest.mark.planted("bit-in-data", "transfer", "refused")
@pytest.mark.parametrize("kept", [False, True], ids=["digested now", "digested before"])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
def test_no_flipped_bit_is_taken_for_what_was_asked_for(transport_of, secret, kept):
    given = {} if secret is None else {"secret": secret}
    source, reader = transport_of("tcp", **given), transport_of("tcp", connections=1, **given)
    source.register(torch.from_numpy(pattern(1, MiB)))
    memory = torch.zeros(MiB, dtype=torch.uint8)
    reader.register(memory)
    before = HEAD_NBYTES
    if kept:
        source.keep_digests(0, np.arange(64) * PIECE, PIECE, epoch=5)
        source._kept._worker.submit(int).result(60)
        before += DIGESTS_NBYTES
    rng = random.Random(7)
    bits = [(TO_CLIENT, rng.randrange(8 * HEAD_NBYTES)) for _ in range(4)]
    bits += [(TO_CLIENT, rng.randrange(8 * before)) for _ in range(6 * kept)]
    data = range(8 * before, 8 * (before + MiB + 4 * 8 * (not kept)))
    bits += [(TO_CLIENT, rng.choice(data)) for _ in range(8)]
    bits += [(TO_SERVER, rng.randrange(8 * REQUEST_NBYTES)) for _ in range(4)]
    bits += [(TO_SERVER, rng.randrange(8 * 44)) for _ in range(2)]
    local = json.loads(source.local())
    with Relay(local["port"], framed=False) as relay:
        handle = reader.connect(json.dumps(local | {"port": relay.port}).encode())
        for way, bit in bits:
            reader.pull(handle, READS, deadline_s=60).done.result()  # over a good connection
            relay.await_only_one()  # the source may still send over one that was given up
            memory.zero_()
            relay.change = FlippedBit(way, bit)
            error = reader.pull(handle, READS, deadline_s=60).done.exception()
            if way == TO_CLIENT:
                assert isinstance(error, PullFailed), bit
                assert error.reason == "corrupt"
            else:  # the source refuses a changed request; it is sent again over a new connection
                assert error is not None or np.array_equal(memory, WANTED), bit


RUNS = np.array([(0, 300), (1000, 25), (400, 175)], RUN)
MEMORY = pattern(2, 2048)


class Wires:
    """What a source sends for requests of a reader, as bytes, and a reader that is given bytes."""

    def __init__(self, monkeypatch, secret=None):
        monkeypatch.setattr(stream, "PIECE_NBYTES", 100)
        self.secret = secret
        self.nonces = (b"n" * 32, b"m" * 32)

    def seals(self):
        return handshake._seals(self.secret, *self.nonces)

    def answer(self, *epochs):
        """Of each request, one after the other on a connection: the pieces, with their sums."""
        here, there = socket.socketpair()
        with here, there:
            reader, source = self.seals(), Stream(there, self.seals())
            answers = []
            for epoch in epochs:
                send_request(here, reader.requests, 0, RUNS, epoch=epoch)
                asked = receive_request(there, source.seals.requests)
                source.send(Region(torch.from_numpy(MEMORY), host=True), asked.runs, asked.seed)
                answers.append([here.recv(108, socket.MSG_WAITALL) for _ in range(5)])
            return answers

    def reads(self, pieces, epoch=5):
        """What a reader whose first request has that epoch makes of `pieces`."""
        memory = torch.zeros(500, dtype=torch.uint8)
        here, there = socket.socketpair()
        with here, there:
            reader = Stream(here, self.seals())
            asked = send_request(here, reader.seals.requests, 0, RUNS, epoch=epoch)
            there.sendall(b"".join(pieces))
            region = Region(memory, host=True)
            reader.receive(region, np.array([(0, 450), (450, 50)], RUN), asked.seed)
        return memory.numpy()


@pytest.mark.parametrize("secret", [None, SharedSecret(SECRET)], ids=["no secret", "secret"])
def test_pieces_count_only_in_their_place(monkeypatch, secret):
    wires = Wires(monkeypatch, secret)
    first, second = wires.answer(5, 5)
    (other,) = wires.answer(6)
    had = np.concatenate([MEMORY[:300], MEMORY[1000:1025], MEMORY[400:575]])
    assert np.array_equal(wires.reads(first), had)
    wrong = [
        [first[1], first[0], *first[2:]],
        [first[0], first[0], *first[2:]],
        [first[0], *first[2:], first[0]],
        second,  # of a later request
        other,  # of another lease
    ]
    for pieces in wrong:
        with pytest.raises(Corrupt):
            wires.reads(pieces)
    wires.nonces = (b"o" * 32, b"m" * 32)
    with pytest.raises(Corrupt):
        wires.reads(first)  # of another connection


def test_what_is_written_while_it_is_sent_fails_no_read(transport_of):
    """Behind the last token of a prompt its owner goes on writing: torn bytes are no damage."""
    source, reader = transport_of("tcp"), transport_of("tcp")
    had, got = torch.zeros(8 * MiB, dtype=torch.uint8), torch.zeros(8 * MiB, dtype=torch.uint8)
    source.register(had)
    reader.register(got)
    handle = reader.connect(source.local())
    ended = threading.Event()

    def write():
        while not ended.is_set():
            had.add_(1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(10):
            reader.pull(handle, Reads(0, [0], 0, [0], 8 * MiB), deadline_s=60).done.result()
    finally:
        ended.set()
        thread.join()
