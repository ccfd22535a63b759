"""A process that reads with NIXL from a peer, kills it meanwhile, and outlives it.

Prints how many of its reads failed. Started anew, as NIXL and UCX look at their environment once.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

import numpy as np
import torch
from peer_process import MiB, make_transport

from kvconnect.errors import PeerUnreachable, PullFailed
from kvconnect.transfer.transport import PeerHandle, Pull, Reads, Transport

NBYTES, PIECE = 16 * MiB, 64 << 10


def read(transport: Transport, peer: PeerHandle) -> Pull:
    offsets = np.arange(0, NBYTES, PIECE)
    return transport.pull(peer, Reads(0, offsets, 0, offsets, PIECE), deadline_s=10)


def main(kind: str, local: str, pid: str) -> None:
    transport = make_transport(kind)
    transport.open()
    transport.register(torch.empty(NBYTES, dtype=torch.uint8))
    peer = transport.connect(bytes.fromhex(local))
    pulls = [read(transport, peer) for _ in range(8)]
    pulls[0].done.result()
    os.kill(int(pid), signal.SIGKILL)
    failed = sum(isinstance(pull.done.exception(), PullFailed) for pull in pulls)
    while not isinstance(read(transport, peer).done.exception(), PullFailed):
        pass  # the kernel has not ended it yet
    failed += 1
    with suppress(PeerUnreachable):
        transport.connect(bytes.fromhex(local))
    transport.disconnect(peer)
    transport.close()
    print(failed, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
