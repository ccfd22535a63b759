"""A peer in a process of its own, with memory of a known content."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from commanded import Commanded

from kvconnect.transfer.nixl import NixlTransport
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp import TcpTransport
from kvconnect.transfer.transport import Reads, Transport

MiB = 1 << 20


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that tell their offset and the seed."""
    words = np.arange(-(-nbytes // 4), dtype=np.uint32)
    words *= np.uint32(2654435761)
    words += np.uint32(seed)
    return words.view(np.uint8)[:nbytes]


def make_transport(kind: str, **settings: Any) -> Transport:
    """``tcp``, ``nixl`` (between processes of one machine: shared memory) or ``nixl-tcp``."""
    if kind == "tcp":
        if isinstance(settings.get("secret"), str):  # which another process can be given
            settings["secret"] = SharedSecret(settings["secret"])
        return TcpTransport(**settings)
    if kind == "nixl-tcp":
        settings["tls"] = "tcp"
    return NixlTransport(**settings)


class _Peer:
    """What runs in the process: an answer for each command."""

    def __init__(self, kind: str, settings: dict[str, Any], seeds: list[tuple[int, int]]) -> None:
        device = settings.pop("device", "cpu")
        self.transport = make_transport(kind, **settings)
        self.memory = [torch.from_numpy(pattern(seed, n)).to(device) for seed, n in seeds]
        self.transport.open()
        for memory in self.memory:
            self.transport.register(memory)

    def local(self) -> bytes:
        return self.transport.local()

    def rebuild(self) -> bytes:
        self.transport.rebuild()
        return self.transport.local()

    def pull(self, peer_local: bytes, reads: list, deadline_s: float) -> bytes:
        """What the region that is read into holds after the reads."""
        peer = self.transport.connect(peer_local)
        self.transport.pull(peer, Reads(*reads), deadline_s=deadline_s).done.result()
        return self.memory[reads[2]].cpu().numpy().tobytes()

    def start_pull(self, peer_local: bytes, reads: list, deadline_s: float) -> None:
        """Begins reads that go on while this process does something else."""
        peer = self.transport.connect(peer_local)
        self.transport.pull(peer, Reads(*reads), deadline_s=deadline_s)

    def cpu_seconds(self) -> float:
        times = os.times()
        return times.user + times.system

    def close(self) -> None:
        self.transport.close()


class PeerProcess(Commanded):
    """Starts a peer; `ask` calls a method of it there."""

    def __init__(
        self,
        kind: str,
        *,
        seeds: list[tuple[int, int]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(_Peer, kind, settings, seeds if seeds is not None else [(1, MiB)])
        self.kind = kind
        self.local: bytes = self.ask("local")
