"""A connected peer on the reading side: lanes, each a connection and the thread that reads it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Annotated, Literal

from pydantic import Field

from kvconnect.errors import PeerUnreachable, PullFailed
from kvconnect.transfer.acceptor import shut
from kvconnect.transfer.local import Local
from kvconnect.transfer.reads import cut
from kvconnect.transfer.regions import Regions
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp.handshake import greet
from kvconnect.transfer.tcp.stream import Corrupt, Stream, prepare
from kvconnect.transfer.tcp.tcp_pull import Share, TcpPull
from kvconnect.transfer.tcp.wire import MAX_RUNS, Malformed, receive_answer, send_request
from kvconnect.transfer.transport import PeerHandle


class TcpLocal(Local):
    """The description that a `TcpTransport` sends to its peers."""

    transport: Literal["tcp"] = "tcp"
    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)]


class TcpPeer(PeerHandle):
    """Reads from one incarnation of a peer, over `lanes` connections.

    `connect` makes the first connection; the others are made when they have something to read. A
    connection whose share failed or was stopped is closed, and made again for the next share.
    """

    def __init__(
        self,
        local: TcpLocal,
        regions: Regions,
        secret: SharedSecret | None,
        *,
        lanes: int,
        connect_s: float,
    ) -> None:
        super().__init__(local.identity, local.incarnation, local.regions)
        self._local = local
        self._memory = regions
        self._secret = secret
        self._connect_s = connect_s
        self._shares: queue.SimpleQueue[Share | None] = queue.SimpleQueue()
        self._lanes = lanes
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._pulls: set[TcpPull] = set()
        self._greeting: set[socket.socket] = set()
        self._closed = False

    def connect(self) -> None:
        """Makes the first connection and starts the lanes; blocks for at most `connect_s`.

        Raises:
            PeerUnreachable: the connection cannot be made.
        """
        first = self._connected()
        for index in range(self._lanes):
            thread = threading.Thread(
                target=self._read_shares,
                args=(first if index == 0 else None,),
                name="kvconnect-tcp-lane",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def take(self, pull: TcpPull, shares: list[Share]) -> None:
        """Queues `shares` of `pull` for the lanes. Does not block.

        Fails `pull` if the peer is disconnected.
        """
        with self._lock:
            pull.expect(shares)
            if not self._closed:
                self._pulls.add(pull)
                for share in shares:
                    self._shares.put(share)
        pull.terminal.add_callback(lambda: self._forget(pull))
        if self._closed:
            pull.fail(PullFailed("peer", f"{self.identity} is disconnected"))

    def stop(self, error: PullFailed) -> None:
        """Fails all pulls with `error` and makes the lanes end. Does not block; see `join`."""
        with self._lock:
            closed, self._closed = self._closed, True
            pulls = list(self._pulls)
            for connection in self._greeting:
                shut(connection)
            if not closed:
                for _ in self._threads:
                    self._shares.put(None)
        for pull in pulls:
            pull.fail(error)

    @property
    def ended(self) -> bool:
        """Returns whether no lane runs."""
        return not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Blocks until no lane runs, after `stop`."""
        for thread in self._threads:
            thread.join()

    def _forget(self, pull: TcpPull) -> None:
        with self._lock:
            self._pulls.discard(pull)

    def _connected(self) -> Stream:
        deadline = time.monotonic() + self._connect_s
        address = (self._local.host, self._local.port)
        where = f"{self.identity} at {address[0]}:{address[1]}"
        try:
            connection = socket.create_connection(address, self._connect_s)
        except OSError as error:
            raise PeerUnreachable(f"{where}: {error.strerror or error}") from error
        try:
            with self._lock:
                if self._closed:
                    raise PeerUnreachable("it is disconnected")
                self._greeting.add(connection)
            prepare(connection)
            seals = greet(connection, self._secret, bytes.fromhex(self.incarnation), deadline)
        except OSError as error:
            connection.close()
            raise PeerUnreachable(f"{where}: {error}") from error
        finally:
            with self._lock:
                self._greeting.discard(connection)
        connection.settimeout(None)
        return Stream(connection, seals)

    def _read_shares(self, stream: Stream | None) -> None:
        while (share := self._shares.get()) is not None:
            stream = self._read_share(stream, share)
        if stream is not None:
            stream.connection.close()

    def _read_share(self, stream: Stream | None, share: Share) -> Stream | None:
        """Reads `share`; returns the connection for the next share, or None if it is closed."""
        if share.pull.stopped:
            return stream
        used = stream is not None
        try:
            if stream is None:
                stream = self._connected()
            if not share.pull.begin(share, stream.connection):
                share.pull.end(share)
                return stream
            error = self._read(stream, share)
        except (OSError, RuntimeError) as broken:  # RuntimeError: the copy to a device failed
            if stream is not None:
                stream.connection.close()
            if used and isinstance(broken, _Stale) and not share.pull.stopped:
                return self._read_share(None, share)
            reason = "corrupt" if isinstance(broken, (Corrupt, Malformed)) else "peer"
            share.pull.end(share, PullFailed(reason, f"{self.identity}: {broken}"))
            return None
        share.pull.end(share, error)
        return stream

    def _read(self, stream: Stream, share: Share) -> PullFailed | None:
        begin = 0
        for first in range(0, len(share.remote), MAX_RUNS):
            asked = share.remote[first : first + MAX_RUNS]
            try:
                request = send_request(
                    stream.connection,
                    stream.seals.requests,
                    share.remote_region,
                    asked,
                    epoch=share.epoch,
                )
                leading = receive_answer(stream.connection, stream.seals.answers, request)
            except Malformed:
                raise
            except OSError as broken:
                raise _Stale(str(broken)) from broken
            if leading is None:
                return PullFailed("refused", f"{self.identity} has not registered that memory")
            region, end = self._memory[share.local_region], begin + request.nbytes
            if leading.nbytes:
                local = cut(share.local, begin, begin + leading.nbytes)
                stream.receive_digested(region, local, leading)
                begin += leading.nbytes
            if begin < end:
                stream.receive(region, cut(share.local, begin, end), request.seed)
            begin = end
        return None


class _Stale(OSError):
    """The error that the connection broke before the answer.

    The source may have closed an idle connection.
    """
