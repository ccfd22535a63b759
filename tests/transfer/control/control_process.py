"""A process that listens: prints its port, then every event, and answers each claim."""

from __future__ import annotations

import queue
import sys
import time

from endpoints import QUICK, Side

from kvconnect.transfer.control.endpoint import Timing
from kvconnect.transfer.control.events import Connected
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.messages import Abort, Claim, Release, Unknown


def main(port: str, timing: str) -> None:
    events: queue.SimpleQueue = queue.SimpleQueue()
    side = Side(
        "P", timing=QUICK if timing == "quick" else Timing(), deliver=lambda *of: events.put(of)
    )
    with Listener(side.endpoint, port=int(port)) as listener:
        print(listener.port, flush=True)
        while True:
            channel, event = events.get()
            if isinstance(event, Release):  # a step of the engine that takes long
                end = time.monotonic() + 1.5
                while time.monotonic() < end:
                    pass
            if isinstance(event, Claim | Release):
                channel.send(Unknown(seq=event.seq, request=event.request))
            elif isinstance(event, Abort):
                return
            name = type(event).__name__
            who = event.hello.engine_id if isinstance(event, Connected) else ""
            print(name, who, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
