"""A reader here, a peer in another process, and a destination full of canaries."""

from __future__ import annotations

import time

import numpy as np
import torch
from peer_process import pattern

from kvconnect.transfer.transport import Pull, Reads

CANARY = 0xA5
BOUND_S = 60.0
PIECE = 64 * 1024


class Canaries:
    """The destination of reads of `peer`, which has the pattern 1.

    Attributes:
        large: the last pull was of more than a piece.
    """

    large = False

    def __init__(self, nbytes, reader, peer):
        self.reader, self.peer = reader, peer
        self.memory = torch.full((nbytes,), CANARY, dtype=torch.uint8)
        self.into = reader.register(self.memory)
        self.other = torch.zeros(16, dtype=torch.uint8)
        self.elsewhere = reader.register(self.other)
        self.handle = reader.connect(peer.local)

    def pull(self, nbytes: int, deadline_s: float) -> Pull:
        self.large = nbytes > PIECE
        offsets = np.arange(0, nbytes, PIECE)
        reads = Reads(0, offsets, self.into, offsets, PIECE)
        return self.reader.pull(self.handle, reads, deadline_s=deadline_s)

    def wait_until_some_bytes_are_there(self):
        bound = time.monotonic() + BOUND_S
        while self.memory[0] == CANARY and self.memory[len(self.memory) // 2] == CANARY:
            assert time.monotonic() < bound

    def put_canaries(self):
        self.memory.fill_(CANARY)

    def canaries_are_untouched(self):
        return bool((self.memory == CANARY).all())

    def read_a_little(self):
        """Whatever the peer still had to send to this reader before, it has sent then."""
        reads = Reads(0, [16], self.elsewhere, [0], 16)
        pull = self.reader.pull(self.handle, reads, deadline_s=BOUND_S)
        pull.done.result(BOUND_S + 1)
        assert np.array_equal(self.other, pattern(1, 32)[16:])
