"""Endpoints for tests: what a process says of itself, and what it heard."""

from __future__ import annotations

import queue
import secrets
from dataclasses import replace
from typing import Any

from waiting import until

from kvconnect.errors import PeerRefused
from kvconnect.transfer.control.description import Compat
from kvconnect.transfer.control.endpoint import Endpoint, Timing
from kvconnect.transfer.control.events import Connected, Disconnected
from kvconnect.transfer.control.messages import Hello
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
