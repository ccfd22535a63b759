"""A process that is P or D: tells what happens on its standard output.

P offers each request of its arguments, answers, and says what it unpins. D claims them, and says
what is granted; it never releases.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from functools import partial

from endpoints import QUICK, Side

from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.peer import Peer
from kvconnect.transfer.leases.server import LeaseServer


def p(port: str, lease_s: str, *requests: str) -> None:
    def unpin(ended):
        for one in ended:
            print(one.why, one.key.request, flush=True)

    with closing(LeaseServer(unpin, max_lease_total=1 << 30, lease_s=float(lease_s))) as server:
        server.start()
        side = Side("P", deliver=server.deliver, timing=QUICK)
        with Listener(side.endpoint, port=int(port)) as listening:
            for request in requests:
                server.offer(request, tokens=64, nbytes=100, blocks=((1, 2),))
            print(listening.port, flush=True)
            time.sleep(60)


def listen(claimed) -> None:
    claimed.listener = lambda: print(claimed.lease.outcome.value, flush=True)


def d(port: str, *requests: str) -> None:
    with closing(LeaseClient()) as client:
        client.start()
        side = Side("D", deliver=partial(client.deliver, "P"), timing=QUICK)
        for request in requests:
            listen(client.claim("P", request))  # sent when it is connected
        with Peer(side.endpoint, "127.0.0.1", int(port)):
            time.sleep(60)


if __name__ == "__main__":
    {"p": p, "d": d}[sys.argv[1]](*sys.argv[2:])
