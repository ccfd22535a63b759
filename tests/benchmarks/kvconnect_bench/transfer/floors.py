"""The floors of a transfer: the same bytes without a transport, and without checksums."""

from __future__ import annotations

import ctypes
import os
import socket
import threading

import numpy as np
import numpy.typing as npt

from kvconnect.errors import KvConnectError
from kvconnect.transfer.reads import Runs
from kvconnect.transfer.regions import Region
from kvconnect.transfer.tcp.stream import Stream

_VECTORS = 1024  # IOV_MAX of Linux


class NotAllowed(KvConnectError):
    """The kernel does not let this process read another one's memory."""


def process_read(
    pid: int,
    remote: npt.NDArray[np.int64],
    local: npt.NDArray[np.int64],
    nbytes: int,
) -> None:
    """Copies pieces of `nbytes` with ``process_vm_readv``; blocks.

    Args:
        pid: the process that is read from.
        remote: int64[n], their addresses there.
        local: int64[n], where they go.
        nbytes: of each.

    Raises:
        NotAllowed: the kernel refuses, or copies fewer bytes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    read = libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    vectors = np.full((2, len(local), 2), nbytes, np.uint64)
    vectors[0, :, 0], vectors[1, :, 0] = local, remote
    for first in range(0, len(local), _VECTORS):
        count = min(_VECTORS, len(local) - first)
        ours, theirs = (
            ctypes.c_void_p(side.ctypes.data) for side in vectors[:, first : first + count]
        )
        done = read(pid, ours, ctypes.c_ulong(count), theirs, ctypes.c_ulong(count), 0)
        if done != count * nbytes:
            error = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} bytes were read"
            raise NotAllowed(f"process_vm_readv: {error}")


class PlainSocket:
    """Sends all of `data` to a connection for every byte that it receives, on own threads.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str, data: memoryview) -> None:
        self._data = data
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Accepts no more connections; open ones last until their reader closes them."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._send, args=(connection,), daemon=True).start()

    def _send(self, connection: socket.socket) -> None:
        with connection:
            while connection.recv(1):
                connection.sendall(self._data)


class BareStream(Stream):
    """Bytes between a socket and host memory as they are, without a copy and a checksum."""

    def send(self, region: Region, runs: Runs, seed: int) -> None:
        """Sends the bytes of `runs`; blocks."""
        vectors = _views(region, runs)
        for first in range(0, len(vectors), _VECTORS):
            some = vectors[first : first + _VECTORS]
            if self.connection.sendmsg(some) != sum(map(len, some)):
                raise ConnectionError("the reader takes nothing")

    def receive(self, region: Region, runs: Runs, seed: int) -> None:
        """Fills `runs` with what comes; blocks."""
        self._receive_all(_views(region, runs))


def _views(region: Region, runs: Runs) -> list[memoryview]:
    memory = region.view()
    return [memory[offset : offset + nbytes] for offset, nbytes in runs.tolist()]


def plain_read(connection: socket.socket, into: memoryview) -> None:
    """Fills `into` with what a `PlainSocket` sends; blocks."""
    connection.sendall(b"x")
    while into:
        received = connection.recv_into(into, 0, socket.MSG_WAITALL)
        if not received:
            raise ConnectionError("the plain socket was closed")
        into = into[received:]
