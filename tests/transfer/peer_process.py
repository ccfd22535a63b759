"""A peer in a process of its own, with memory of a known content."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from frozen import freeze

from kvconnect.transfer.nixl import NixlTransport
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp import TcpTransport
from kvconnect.transfer.transport import Reads, Transport

MiB = 1 << 20

_CONTEXT = multiprocessing.get_context("forkserver")


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
        """What region 0 holds after the reads."""
        peer = self.transport.connect(peer_local)
        self.transport.pull(peer, Reads(*reads), deadline_s=deadline_s).done.result()
        return self.memory[0].cpu().numpy().tobytes()

    def start_pull(self, peer_local: bytes, reads: list, deadline_s: float) -> None:
        """Begins reads that go on while this process does something else."""
        peer = self.transport.connect(peer_local)
        self.transport.pull(peer, Reads(*reads), deadline_s=deadline_s)

    def cpu_seconds(self) -> float:
        times = os.times()
        return times.user + times.system

    def close(self) -> None:
        self.transport.close()


def _main(
    commands: Connection, kind: str, settings: dict[str, Any], seeds: list[tuple[int, int]]
) -> None:
    try:
        peer = _Peer(kind, settings, seeds)
        commands.send(None)
        while True:
            method, arguments = commands.recv()
            commands.send(getattr(peer, method)(*arguments))
    except EOFError:
        os._exit(0)
    except Exception as error:  # noqa: BLE001 - the test raises it
        commands.send(error)
        os._exit(1)


class PeerProcess:
    """Starts a peer; `ask` calls a method of it there."""

    def __init__(
        self,
        kind: str,
        *,
        seeds: list[tuple[int, int]] | None = None,
        **settings: Any,
    ) -> None:
        self.kind = kind
        self._commands, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_main,
            args=(theirs, kind, settings, seeds if seeds is not None else [(1, MiB)]),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self._answer()
        self.local: bytes = self.ask("local")

    def ask(self, method: str, *arguments: Any) -> Any:
        self._commands.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        if not self._commands.poll(60):
            raise TimeoutError("the peer process said nothing for 60 s")
        answer = self._commands.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kills it, frozen or not."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(60)
        self._commands.close()

    def freeze(self) -> None:
        freeze(self.process.pid)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)
