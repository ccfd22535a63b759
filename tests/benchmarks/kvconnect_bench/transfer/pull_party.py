"""The process of one side of a pull: memory of a known content, transports, and the floors."""

from __future__ import annotations

import base64
import socket
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvconnect.bench.store.floor import seconds_of
from kvconnect.transfer.tcp import peer, source
from kvconnect.transfer.transport import PeerHandle, Reads, Transport
from kvconnect_bench.blocks.worker import methods, serve, take_stdout
from kvconnect_bench.transfer.floors import (
    BareStream,
    NotAllowed,
    PlainSocket,
    plain_read,
    process_read,
)

_DEADLINE_S = 60.0


class PullParty:
    """A side of a pull. Each method is a workload, called by its name."""

    def __init__(self) -> None:
        self._memory = torch.zeros(8, dtype=torch.uint8)
        self._transports: dict[str, Transport] = {}
        self._peers: dict[str, PeerHandle] = {}
        self._listeners: list[PlainSocket] = []
        self._plain: dict[tuple[str, int], socket.socket] = {}

    def fill(self, nbytes: int) -> int:
        """Allocates `nbytes`, whose words of 8 bytes count up; returns their address."""
        self._memory = torch.from_numpy(np.arange(nbytes // 8, dtype=np.int64).view(np.uint8))
        return self._memory.data_ptr()

    def open(self, name: str, settings: dict[str, Any]) -> str:
        """Opens a transport of that `name`; returns what a peer's `connect` takes."""
        self._transports[name] = transport = _transport(name, settings)
        transport.register(self._memory)
        transport.open()
        return base64.b64encode(transport.local()).decode()

    def connect(self, name: str, local: str) -> None:
        """Connects to the other side's transport of that `name`."""
        self._peers[name] = self._transports[name].connect(base64.b64decode(local))

    def leave_checksums_out(self) -> None:
        """Makes later TCP connections carry bytes without checksums."""
        for module in (peer, source):
            vars(module)["Stream"] = BareStream

    def keep_digests(self, name: str, nbytes: int, epoch: int) -> None:
        """Makes a transport digest this side's memory, as one does with a published prompt."""
        offsets = np.arange(0, self._memory.numel(), nbytes)
        self._transports[name].keep_digests(0, offsets, nbytes, epoch=epoch)

    def listen(self, host: str) -> int:
        """Serves this side's memory over plain sockets; returns the port."""
        self._listeners.append(PlainSocket(host, self._memory.numpy().data))
        return self._listeners[-1].port

    def pull(self, name: str, pieces: int, nbytes: int, epoch: int) -> float:
        """Returns the seconds to read so many pieces of `nbytes`, in random order there."""
        remote, local = _order(self._memory.numel(), pieces, nbytes)
        reads = Reads(0, remote, 0, local, nbytes, epoch)

        def pull() -> None:
            pulled = self._transports[name].pull(self._peers[name], reads, deadline_s=_DEADLINE_S)
            pulled.done.result()

        return seconds_of(pull)

    def refusal(self, pid: int, address: int) -> str:
        """Returns why this process may not read the memory of `pid`, or an empty string."""
        try:
            here = np.array([self._memory.data_ptr()], np.int64)
            process_read(pid, np.array([address], np.int64), here, 8)
        except NotAllowed as error:
            return str(error)
        return ""

    def process_read(self, pid: int, address: int, pieces: int, nbytes: int) -> float:
        """Returns the seconds to read the pieces of `pull` with ``process_vm_readv``."""
        remote, local = _order(self._memory.numel(), pieces, nbytes)
        remote, local = remote + address, local + self._memory.data_ptr()
        return seconds_of(lambda: process_read(pid, remote, local, nbytes))

    def plain_read(self, host: str, port: int) -> float:
        """Returns the seconds to read all of the other side's memory over one plain socket."""
        if (host, port) not in self._plain:
            self._plain[host, port] = socket.create_connection((host, port))
        connection, memory = self._plain[host, port], self._memory.numpy().data
        return seconds_of(lambda: plain_read(connection, memory))

    def forget(self) -> None:
        """Clears this side's memory, so that `has_read` shows what was read since."""
        self._memory.zero_()

    def has_read(self, pieces: int, nbytes: int) -> bool:
        """Returns whether the memory holds what a read of these pieces leaves."""
        remote, local = _order(self._memory.numel(), pieces, nbytes)
        words = self._memory.numpy().view(np.int64)
        last = nbytes // 8 - 1
        return bool(
            (words[local // 8] == remote // 8).all()
            and (words[local // 8 + last] == remote // 8 + last).all()
        )


def _order(
    total: int, pieces: int, nbytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns offsets there, in the same random order each time, and here, in sequence."""
    there = np.random.default_rng(0).permutation(total // nbytes)[:pieces] * nbytes
    return there, np.arange(pieces, dtype=np.int64) * nbytes


def _transport(name: str, settings: dict[str, Any]) -> Transport:
    if name == "tcp":
        from kvconnect.transfer.secret import SharedSecret
        from kvconnect.transfer.tcp import TcpTransport

        secret = settings.get("secret")
        secrets = {} if secret is None else {"secret": SharedSecret(secret)}
        return TcpTransport(**settings | secrets)
    from kvconnect.transfer.nixl import NixlTransport

    return NixlTransport(**settings)


def main() -> None:
    """Answers until standard input ends."""
    answers = take_stdout()
    serve(answers, {"torch": torch.__version__}, methods(PullParty()))


if __name__ == "__main__":
    main()
