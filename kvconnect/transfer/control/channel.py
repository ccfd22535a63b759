"""An open connection to a peer."""

from __future__ import annotations

import itertools
import logging
import threading
import time

from kvconnect.errors import BadMessage
from kvconnect.trace import count
from kvconnect.transfer.control.endpoint import Endpoint
from kvconnect.transfer.control.events import Connected, Disconnected, Event
from kvconnect.transfer.control.keyed import GrantKeys
from kvconnect.transfer.control.messages import (
    MAX_MESSAGE_NBYTES,
    Error,
    Grant,
    Hello,
    Message,
    Ping,
    Pong,
    Proof,
    Renewed,
    decode,
    encode,
)
from kvconnect.transfer.control.send_queue import SendQueue
from kvconnect.transfer.control.wire import Wire, WireClosed, WireTimeout

__all__ = ["Channel"]

logger = logging.getLogger("kvconnect")

_MAX_WAITING_NBYTES = 4 * MAX_MESSAGE_NBYTES
_MAX_WAITING_FRAMES = 16_384
# Messages queued before `close` are still sent if the peer reads them within this time.
_LAST_WORDS_S = 1.0
# A peer that reads one piece of this size within the time limit is slow, not dead.
_PIECE_NBYTES = 256 << 10


class Channel:
    """An open connection to a peer, made by `Listener` or `Peer`.

    Two threads of the channel read, write and send the heartbeat, independent of the rest of the
    process. A peer that closes or dies is detected at once, a silent one after ``silence_s``.
    Messages arrive in order and none is skipped, or the channel closes. After a close it is unknown
    which of the last messages arrived.

    Attributes:
        peer: the peer's `Hello`.
        host: the peer's host, as of `host_of`; empty if this side connected.
        round_trip_s: the seconds from the last heartbeat to its answer; ``None`` before the first.
        used_at: the time (monotonic) of the last grant or renewal for the peer; ``None`` if never.
    """

    def __init__(self, wire: Wire, endpoint: Endpoint, peer: Hello, host: str = "") -> None:
        self.peer = peer
        self.host = host
        self.round_trip_s: float | None = None
        self.used_at: float | None = None
        self._wire = wire
        self._endpoint = endpoint
        self._queue = SendQueue(_MAX_WAITING_NBYTES, _MAX_WAITING_FRAMES, wire.frame)
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._pinged: tuple[int, float] = (-1, 0.0)
        wire.limit = MAX_MESSAGE_NBYTES

    def __repr__(self) -> str:
        state = "open" if self.is_open else f"closed: {self._reason}"
        return f"Channel({self.peer.engine_id!r}, rank={self.peer.rank}, {state})"

    @property
    def is_open(self) -> bool:
        """Returns whether `send` accepts messages. An accepted message may still be lost."""
        return self._reason is None

    @property
    def reason(self) -> str | None:
        """The reason for which the channel was closed; ``None`` while it is open."""
        return self._reason

    def send(self, message: Message) -> bool:
        """Queues `message` for sending. Does not block. Any thread may call this.

        Returns:
            False if the channel is closed, or is closed now because the peer reads too slowly. The
            message is lost then. True does not mean that the message arrives.

        Raises:
            ConfigurationError: `message` is larger than `MAX_MESSAGE_NBYTES`.
        """
        if isinstance(message, (Grant, GrantKeys)) or (
            isinstance(message, Renewed) and message.leases
        ):
            self.used_at = time.monotonic()
        if self._queue.send(encode(message), self._wire.write_now):
            return True
        if not self._queue.closed:
            self._close_now("the peer does not take what is sent")
        return False

    def close(self, reason: str = "closed here") -> None:
        """Closes the channel after the queued messages were sent. Does not block; idempotent.

        `Disconnected` follows at once if the peer answers, else after ``silence_s``. No other event
        is delivered any more.
        """
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        self._queue.put(encode(Error(kind="closing", message=reason[:1024])))
        self._queue.close()

    def cut(self, reason: str) -> None:
        """Closes the channel at once and drops queued messages. Does not block; idempotent."""
        with self._lock:
            was_open = self._reason is None
            self._reason = self._reason or reason  # before the peer notices and closes
        if was_open:
            said = encode(Error(kind="closing", message=reason[:1024]))
            self._queue.send(said, self._wire.write_now)
        self._close_now(reason)

    def run(self) -> None:
        """Delivers the peer's messages; blocks until the channel has ended. Called once.

        Raises:
            RuntimeError: no thread can be started; nothing was delivered, the connection is closed.
        """
        writer = threading.Thread(target=self._write, name="kvconnect-control-write", daemon=True)
        try:
            writer.start()
            if self._deliver(Connected(self.peer)):
                self._read()
                writer.join()
                self._deliver(Disconnected(self._reason or "closed"))
            else:
                writer.join()
        finally:
            self._close_now("stopped")
            self._wire.close()

    def _read(self) -> None:
        silence_s = self._endpoint.timing.silence_s
        try:
            while True:
                silent_at = self._wire.heard_at + silence_s
                try:
                    payload = self._wire.read(silent_at)
                except WireTimeout:
                    if self._wire.heard_at + silence_s > silent_at:
                        continue  # part of a large message came
                    count("transfer.control.silent")
                    self._close_now(f"the peer gave no sign of life for {silence_s} s")
                    return
                if not self._handle(decode(payload)):
                    return
        except WireClosed as error:
            self._close_now(str(error))
        except BadMessage as error:
            count("transfer.control.bad_message")
            self._close_now(f"the peer broke the protocol: {error}")

    def _handle(self, message: Message) -> bool:
        """Handles one message; returns whether to continue reading."""
        if isinstance(message, Ping):
            self._queue.put(encode(Pong(number=message.number)))
        elif isinstance(message, Pong):
            number, at = self._pinged
            if message.number == number:
                self.round_trip_s = time.monotonic() - at
        elif isinstance(message, Error):
            self._close_now(f"the peer closed: {message.message or message.kind}")
            return False
        elif isinstance(message, (Hello, Proof)):
            raise BadMessage(f"{type(message).__name__} after the opening")
        elif self.is_open:
            return self._deliver(message)
        return True

    def _deliver(self, event: Event) -> bool:
        try:
            self._endpoint.deliver(self, event)
        except Exception as error:  # noqa: BLE001  whatever its owner's code does wrong
            count("transfer.control.not_taken")
            logger.warning("%r: %s was not taken: %r", self, type(event).__name__, error)
            self._close_now(f"{type(event).__name__} was not taken: {error}")
            return False
        return True

    def _write(self) -> None:
        timing = self._endpoint.timing
        numbers = itertools.count()
        ping_at = time.monotonic()
        try:
            while (data := self._queue.take(ping_at)) is not None:
                now = time.monotonic()
                if now >= ping_at:  # the ping is sent next, behind messages queued meanwhile
                    ping_at = now + timing.heartbeat_s
                    self._pinged = (next(numbers), now)
                    self._queue.put(encode(Ping(number=self._pinged[0])))
                for start in range(0, len(data), _PIECE_NBYTES):
                    limit_s = timing.silence_s if self.is_open else _LAST_WORDS_S
                    piece = data[start : start + _PIECE_NBYTES]
                    self._wire.write(piece, time.monotonic() + limit_s)
            # The peer closes when it has read all; closing first could destroy unread messages.
            self._wire.shut_writing()
        except WireTimeout:
            self._close_now("the peer does not take what is sent")
        except WireClosed as error:
            self._close_now(str(error))

    def _close_now(self, reason: str) -> None:
        with self._lock:
            if self._reason is None:
                self._reason = reason
        self._queue.close()
        self._wire.shut()
