"""The thread that publishes events over ZeroMQ, in vLLM's format."""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from kvconnect.cache.pool.events import KvCacheEvent
from kvconnect.errors import ConfigurationError
from kvconnect.events.format import (
    END_OF_REPLAY,
    AllBlocksCleared,
    Batch,
    WireEvent,
    most_nbytes,
    number_frame,
)
from kvconnect.events.settings import EventsConfig
from kvconnect.events.translation import Translation
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import count, warn_once

_BATCH_NBYTES = 64 << 10
"""The longest batch, but for one that has a single event."""
_KEPT_NBYTES = 64 << 20
_UNSENT = 1000
"""Messages that are kept for one slow subscriber, so 64 MiB; later ones do not reach it."""
_LINGER_MS = 200
_CLOSE_S = 1.0
_ERROR_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class EventsAddress:
    """The sockets of a publisher.

    Attributes:
        publisher: the publisher's unique name.
        endpoint: the endpoint of the PUB socket, ``tcp://HOST:PORT``; the host is 0.0.0.0 for all
            addresses.
        replay_endpoint: the replay endpoint of the ROUTER socket.
        topic: the topic of the messages.
    """

    publisher: str
    endpoint: str
    replay_endpoint: str
    topic: str


class EventPublisher:
    """Publishes what `take` returns. Slow subscribers miss batches, and delay nothing.

    An error of any kind, which `problem` shows, does not end the thread. It drops the events that
    wait then, and its next batch clears all blocks, too.

    Batches are numbered from 0. The first one clears all blocks: subscribers of an earlier process
    at the same endpoint then drop its blocks. The batch after dropped events, of a publisher that
    was too slow, clears all blocks, too, because blocks may have been removed unseen.

    The constructor makes the sockets listen. `start` starts the thread that sends events.

    Args:
        config: the configuration of the sockets.

    Attributes:
        address: the address of the sockets.

    Raises:
        ConfigurationError: an endpoint cannot be listened on.
    """

    def __init__(self, config: EventsConfig) -> None:
        self._context = zmq.Context()
        try:
            self._pub = self._listen(zmq.PUB, config.endpoint, "endpoint", _UNSENT)
            self._router = self._listen(
                zmq.ROUTER, config.replay, "replay_endpoint", config.buffer_steps + 1
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = EventsAddress(
            uuid.uuid4().hex, _bound(self._pub), _bound(self._router), config.topic
        )
        self._topic = config.topic.encode()
        self._kept = _KeptBatches(config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers = itertools.count()
        self._next_id = 0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._lost = True  # subscribers of an earlier process may believe anything
        self._problem: str | None = None
        self._forgetting: list[threading.Event] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(
        self,
        take: Callable[[], list[KvCacheEvent]],
        layouts: Sequence[KvCacheLayout],
    ) -> None:
        """Starts the thread that publishes what `take` returns, for pools of `layouts`."""
        self._take = take
        self._translation = Translation(layouts)
        self._thread = threading.Thread(target=self._run, name="kvconnect-events", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """Makes the thread take events; from any thread, in about a microsecond."""
        with self._lock:  # the number of a closed descriptor may be reused
            if not self._closing:
                os.eventfd_write(self._bell, 1)

    @property
    def problem(self) -> str | None:
        """The error for which nothing is published now; ``None``: there is none."""
        thread = self._thread
        if thread is not None and not thread.is_alive() and not self._closing:
            return "the thread that publishes events has ended"
        return self._problem

    def forget(self) -> None:
        """Publishes the events so far, then drops all that is kept for replay.

        From any thread; blocks until it is done, for some milliseconds. What slow subscribers have
        yet to receive is not dropped.
        """
        done = threading.Event()
        with self._lock:
            if self._closing or self._thread is None or not self._thread.is_alive():
                return  # it answers no replay
            self._forgetting.append(done)
            os.eventfd_write(self._bell, 1)
        done.wait()

    def close(self) -> None:
        """Publishes the last events and closes the sockets; blocks for about 1 s at most."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._bell, 1)
        if self._thread is None:
            self._shut(0)
        else:
            self._thread.join(_CLOSE_S)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            while not self._closing:
                try:
                    if self._lost:
                        self._publish()
                    else:
                        self._serve(dict(poller.poll()))
                except Exception as error:  # noqa: BLE001  shown by `problem`
                    self._failed(error)
            self._publish()
        finally:
            self._shut(_LINGER_MS)
            self._forget_kept(self._forgetting)

    def _failed(self, error: Exception) -> None:
        self._problem = f"{type(error).__name__}: {error}"
        self._lost = True
        warn_once("events", f"events of the KV cache are not published: {self._problem}")
        time.sleep(_ERROR_WAIT_S)

    def _serve(self, ready: dict[object, int]) -> None:
        if self._bell in ready:
            os.eventfd_read(self._bell)
            self._publish()
        if self._router in ready:
            self._replay()

    def _publish(self) -> None:
        with self._lock:  # first: those who ask later may mean events that are not taken here
            forgetting, self._forgetting = self._forgetting, []
        try:
            events = self._take()
            if self._lost:
                self._send([AllBlocksCleared()])
                self._lost = False
            if self._problem is None:
                for batch in _batches(self._translated(events)):
                    self._send(batch)
            self._problem = None
        finally:
            self._forget_kept(forgetting)

    def _forget_kept(self, forgetting: Sequence[threading.Event]) -> None:
        """Drops what is kept for replay, if any caller of `forget` waits for it."""
        if forgetting:
            self._kept.clear()
        for done in forgetting:
            done.set()

    def _translated(self, events: list[KvCacheEvent]) -> Iterator[WireEvent]:
        for event in events:
            if event.event_id != self._next_id:
                count("events.dropped", events=event.event_id - self._next_id)
                yield AllBlocksCleared()
            self._next_id = event.event_id + 1
            yield from self._translation.of(event)

    def _send(self, events: list[WireEvent]) -> None:
        payload = self._encoder.encode(Batch(time.time(), events, 0))
        number = next(self._numbers)
        self._kept.add(number, payload)
        self._pub.send_multipart((self._topic, number_frame(number), payload))
        count("events.published", events=len(events), bytes=len(payload))

    def _replay(self) -> None:
        """Answers one request for a replay: the kept batches from its number on, then the end."""
        frames = self._router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != len(END_OF_REPLAY):
            count("events.bad_replay")
            return
        client, empty, first = frames
        sent = 0
        for number, payload in self._kept.since(int.from_bytes(first, "big")):
            frame = number_frame(number)
            self._router.send_multipart((client, empty, self._topic, frame, payload))
            sent += 1
        self._router.send_multipart((client, empty, b"", END_OF_REPLAY, b""))
        count("events.replayed", batches=sent)

    def _shut(self, linger_ms: int) -> None:
        with self._lock:
            self._closing = True
            os.close(self._bell)
        self._context.destroy(linger=linger_ms)

    def _listen(self, kind: int, endpoint: str, field: str, unsent: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(unsent)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"events.{field}: '{endpoint}': {error}") from error
        return socket


class _KeptBatches:
    """The newest batches, for replay."""

    def __init__(self, most: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._most = most
        self._nbytes = 0

    def add(self, number: int, payload: bytes) -> None:
        """Adds a batch; drops the oldest ones beyond the limits."""
        self._batches.append((number, payload))
        self._nbytes += len(payload)
        while len(self._batches) > self._most or (
            self._nbytes > _KEPT_NBYTES and len(self._batches) > 1
        ):
            self._nbytes -= len(self._batches.popleft()[1])

    def clear(self) -> None:
        """Drops all batches."""
        self._batches.clear()
        self._nbytes = 0

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yields the kept batches from `number` on."""
        return (one for one in self._batches if one[0] >= number)


def _batches(events: Iterable[WireEvent]) -> Iterator[list[WireEvent]]:
    """Yields `events` in batches of up to `_BATCH_NBYTES`."""
    batch: list[WireEvent] = []
    nbytes = 0
    for event in events:
        size = most_nbytes(event)
        if batch and nbytes + size > _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(event)
        nbytes += size
    if batch:
        yield batch


def _bound(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
