"""Endpoints for tests: what a process says of itself, and what it heard."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from dataclasses import replace
from typing import Any

from commanded import Commanded
from waiting import until

from kvconnect.errors import PeerRefused
from kvconnect.transfer.control.description import Compat
from kvconnect.transfer.control.endpoint import Connected, Disconnected, Endpoint, Timing
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.messages import Claim, Hello, Unknown
from kvconnect.transfer.control.peer import Peer

QUICK = Timing(heartbeat_s=0.1, silence_s=60, handshake_s=60, first_pause_s=0.02, last_pause_s=0.2)
"""Of tests in which no peer is silent: a busy machine may stop one for a while."""
SHORT = replace(QUICK, silence_s=1.0, handshake_s=1.0)
"""Of tests that wait until a silent peer is given up."""
COMPAT = Compat(
    model="digest",
    dtype="float64",
    num_layers=2,
    num_kv_heads=4,
    key_dim=8,
    value_dim=8,
    block_format=1,
    transport="tcp",
)


class Side:
    """One side of a channel; `events` holds what it was delivered."""

    def __init__(self, engine_id: str, *, secret=None, timing=QUICK, deliver=None, **changes):
        self.hello = Hello(
            compat=COMPAT.model_copy(update=changes),
            engine_id=engine_id,
            boot=secrets.token_bytes(16),
            local=b"local",
        )
        self.events: queue.Queue[Any] = queue.Queue()
        self.channels: list[Any] = []
        self.endpoint = Endpoint(lambda: self.hello, deliver or self._take, secret, timing)

    def _take(self, channel, event):
        if isinstance(event, Connected):
            self.channels.append(channel)
        self.events.put(event)

    def next(self, timeout_s: float = 60.0):
        return self.events.get(timeout=timeout_s)

    def connected(self) -> Hello:
        event = self.next()
        assert isinstance(event, Connected), event
        return event.hello

    def disconnected(self, timeout_s: float = 60.0) -> str:
        event = self.next(timeout_s)
        assert isinstance(event, Disconnected), event
        return event.reason


def opened(peer: Peer) -> bool:
    """Whether the peer's channel opens; False: it is refused."""
    until(lambda: peer.channel is not None or isinstance(peer.error, PeerRefused))
    return peer.channel is not None


class _Listening:
    """What runs in the process: it answers each claim."""

    def __init__(self, port: int, timing: Timing) -> None:
        side = Side("P", timing=timing, deliver=self._answer)
        self._listener = Listener(side.endpoint, port=port)

    def port(self) -> int:
        return self._listener.port

    def _answer(self, channel, event):
        if isinstance(event, Claim):
            channel.send(Unknown(seq=event.seq, request=event.request))

    def compute(self, seconds: float) -> None:
        """A step of the engine, in Python."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def close(self) -> None:
        self._listener.close()


class ListeningProcess(Commanded):
    """A side in a process of its own that listens."""

    def __init__(self, port: int = 0, timing: Timing = QUICK) -> None:
        super().__init__(_Listening, port, timing)
        self.port: int = self.ask("port")


class NoThread(threading.Thread):
    """One that the machine has no room for."""

    def start(self):
        raise RuntimeError("can't start new thread")
