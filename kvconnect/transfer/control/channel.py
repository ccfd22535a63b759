"""An open connection to a peer, and the queue of the messages that wait to be sent."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvconnect.errors import BadMessage
from kvconnect.trace import count
from kvconnect.transfer.control.endpoint import Connected, Disconnected, Endpoint, Event
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
from kvconnect.transfer.control.wire import Wire, WireClosed, WireTimeout

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
        used_at: the time (monotonic) of the last grant or renewal for the peer; ``None`` if never.
        reason: the reason for which the channel was closed; ``None`` while it is open.
    """

    def __init__(self, wire: Wire, endpoint: Endpoint, peer: Hello, host: str = "") -> None:
        self.peer = peer
        self.host = host
        self.used_at: float | None = None
        self._wire = wire
        self._endpoint = endpoint
        self._queue = SendQueue(_MAX_WAITING_NBYTES, _MAX_WAITING_FRAMES, wire.frame)
        self._lock = threading.Lock()
        self.reason: str | None = None
        wire.limit = MAX_MESSAGE_NBYTES

    def __repr__(self) -> str:
        state = "open" if self.is_open else f"closed: {self.reason}"
        return f"Channel({self.peer.engine_id!r}, rank={self.peer.rank}, {state})"

    @property
    def is_open(self) -> bool:
        """Returns whether `send` accepts messages. An accepted message may still be lost."""
        return self.reason is None

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
            if self.reason is not None:
                return
            self.reason = reason
        self._queue.put(encode(Error(kind="closing", message=reason[:1024])))
        self._queue.close()

    def cut(self, reason: str) -> None:
        """Closes the channel at once and drops queued messages. Does not block; idempotent."""
        with self._lock:
            was_open = self.reason is None
            self.reason = self.reason or reason  # before the peer notices and closes
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
                self._deliver(Disconnected(self.reason or "closed"))
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
        elif isinstance(message, Error):
            self._close_now(f"the peer closed: {message.message or message.kind}")
            return False
        elif isinstance(message, (Hello, Proof)):
            raise BadMessage(f"{type(message).__name__} after the opening")
        elif self.is_open and not isinstance(message, Pong):
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
                    self._queue.put(encode(Ping(number=next(numbers))))
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
            if self.reason is None:
                self.reason = reason
        self._queue.close()
        self._wire.shut()


class SendQueue:
    """A bounded queue from any number of threads to one. Only `take` blocks.

    Args:
        max_nbytes: the most bytes of waiting frames; at least the largest frame.
        max_frames: the most waiting frames.
        frame: makes the next frame of a payload; called by one thread at a time.

    Attributes:
        closed: whether the queue is closed and accepts nothing more.
    """

    def __init__(self, max_nbytes: int, max_frames: int, frame: Callable[[bytes], bytes]) -> None:
        self._frames: deque[bytes] = deque()
        self._nbytes = 0
        self._max_nbytes = max_nbytes
        self._max_frames = max_frames
        self._frame = frame
        self._changed = threading.Condition()
        self.closed = False
        self._taken = False  # the caller of `take` sends its frames, which no other may overtake

    def put(self, payload: bytes) -> bool:
        """Appends `payload`; drops it and returns False if the queue is full or closed."""
        with self._changed:
            return self._put(payload)

    def send(self, payload: bytes, write: Callable[[bytes], int]) -> bool:
        """Makes `write` send `payload` at once if the queue is empty; else acts as `put`.

        Bytes that `write` does not accept wait in the queue.

        Args:
            payload: the payload of one frame.
            write: sends the first bytes of its argument and returns their number; must not block.
                Called on this thread, one call at a time, and never while the caller of `take`
                sends.

        Returns:
            False if the queue is full or closed.
        """
        with self._changed:
            if self._frames or self._taken or self.closed:
                return self._put(payload)
            data = self._frame(payload)
            sent = write(data)
            if sent < len(data):
                self._keep(data[sent:])
            return True

    def _put(self, payload: bytes) -> bool:
        # A frame that is made must be sent: the codes of later frames depend on it.
        fits = self._nbytes + len(payload) <= self._max_nbytes
        if self.closed or not fits or len(self._frames) >= self._max_frames:
            return False
        self._keep(self._frame(payload))
        return True

    def _keep(self, data: bytes) -> None:
        self._frames.append(data)
        self._nbytes += len(data)
        self._changed.notify()

    def take(self, until: float) -> bytes | None:
        """Returns all waiting frames, joined; blocks until there is one.

        The caller has sent everything that an earlier call returned.

        Returns:
            The frames; empty if there is none at `until` (`time.monotonic`). ``None`` if the queue
            is closed and empty.
        """
        with self._changed:
            self._taken = False
            self._changed.wait_for(
                lambda: self._frames or self.closed, max(0.0, until - time.monotonic())
            )
            self._taken = True
            if not self._frames:
                return None if self.closed else b""
            data = b"".join(self._frames)
            self._frames.clear()
            self._nbytes = 0
            return data

    def close(self) -> None:
        """Closes the queue. Waiting frames can still be taken."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
