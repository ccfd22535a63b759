"""The side that is read from: listens, and sends what authenticated readers ask for."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from kvconnect.trace import count
from kvconnect.transfer.acceptor import Acceptor, shut
from kvconnect.transfer.reads import cut
from kvconnect.transfer.regions import Regions, outside
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp.handshake import answer
from kvconnect.transfer.tcp.kept_digests import KeptDigests
from kvconnect.transfer.tcp.stream import Stream, block_until, prepare
from kvconnect.transfer.tcp.wire import Malformed, receive_request, send_answer, send_refusal

_HANDSHAKE_S = 5.0
_STALL_S = 10.0


@dataclass(eq=False, slots=True)
class _Reader:
    """A connected reader.

    Attributes:
        host: see `host_of`.
        used_at: the time (monotonic) of its last request that was served; ``None`` if none was.
    """

    stream: Stream
    host: str
    used_at: float | None = None

    def cut(self, reason: str) -> None:
        """Shuts the connection down, which ends the calls of its thread that block."""
        shut(self.stream.connection)

    close = cut


class Source(Acceptor[_Reader]):
    """Serves reads of `regions`. `close` blocks until no thread reads registered memory.

    A handshake takes at most `_HANDSHAKE_S`. A reader that reads none of its requested bytes for
    `_STALL_S` is disconnected. For `least_useful`, a reader is used when a request is served.

    Args:
        regions: the memory that readers may read; may grow later.
        kept: the digests of the parts of this memory that do not change.
        secret: the secret that readers must prove; ``None`` if there is none.
        incarnation: the transport's incarnation; readers that expect another one are refused.
        host, port: see `Acceptor`.

    Raises:
        ConfigurationError: the port is taken, or the address is not this machine's.
    """

    def __init__(
        self,
        regions: Regions,
        kept: KeptDigests,
        secret: SharedSecret | None,
        incarnation: bytes,
        host: str,
        port: int,
    ) -> None:
        self._regions = regions
        self._kept = kept
        self._secret = secret
        self._incarnation = incarnation
        super().__init__("tcp", host, port)

    def _open(self, sock: socket.socket, host: str) -> _Reader | None:
        with suppress(OSError):  # a reader's fault ends its connection, nothing else
            prepare(sock)
            deadline = time.monotonic() + _HANDSHAKE_S
            seals = answer(sock, self._secret, self._incarnation, deadline)
            if seals is not None:
                return _Reader(Stream(sock, seals), host)
            count("transfer.tcp.strangers")
        return None

    def _serve(self, admitted: _Reader) -> None:
        with suppress(OSError):
            block_until(admitted.stream.connection, socket.SO_SNDTIMEO, _STALL_S)
            while True:
                self._answer(admitted)

    def _answer(self, reader: _Reader) -> None:
        stream = reader.stream
        connection, seals = stream.connection, stream.seals
        try:
            asked = receive_request(connection, seals.requests)
        except Malformed:
            count("transfer.tcp.malformed")
            raise
        offsets, nbytes = asked.runs["offset"], asked.runs["nbytes"]
        if outside(self._regions.sizes(), asked.region, offsets, nbytes) is not None:
            count("transfer.tcp.refused")
            send_refusal(connection, seals.answers)
            return
        reader.used_at = time.monotonic()
        region = self._regions[asked.region]
        leading = self._kept.leading(asked.region, asked.runs, asked.epoch)
        send_answer(connection, seals.answers, asked, leading)
        if leading.nbytes:
            stream.send_digested(region, cut(asked.runs, 0, leading.nbytes))
        if leading.nbytes < asked.nbytes:
            stream.send(region, cut(asked.runs, leading.nbytes, asked.nbytes), asked.seed)
