"""The peers that this process reads from: connections, questions and their answers."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from kvconnect.address import host_and_port
from kvconnect.errors import KvConnectError, RetryLater
from kvconnect.transfer.control.endpoint import (
    Connected,
    Deliver,
    Disconnected,
    Endpoint,
    Event,
    Sender,
    Timing,
)
from kvconnect.transfer.control.keyed import ForgotKeys, FoundChildren, FoundKeys
from kvconnect.transfer.control.messages import FoundDigest, Hello, Message
from kvconnect.transfer.control.peer import Peer
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.transport import PeerHandle, Transport

Answer = Future[Message]
"""The answer to a question; is cancelled when the connection is lost."""

_ANSWERS = (FoundDigest, FoundKeys, FoundChildren, ForgotKeys)
_MAX_LINKS = 64
# The pause between attempts to connect to a peer that is not needed now.
_IDLE_PAUSE_S = 30.0


class PeerLink:
    """A peer that this process reads from, and its state.

    Args:
        address: ``host:port`` of its control channel; its name among the leases, too.
        connect: starts the attempts to connect.

    Attributes:
        address: as given.
        peer: the attempts to connect, and their channel.
        hello: the peer's last `Hello`.
        channel: the open channel; ``None`` if the peer cannot be asked.
        handle: the transport's handle for reads; ``None`` if the peer is not connected.
        refused: the error for which a peer that answered was not connected.
        is_self: the peer is this process.
        is_double: another link is connected to the same process under another address.
        users: the number of calls of `Peers.use` without a later `Peers.leave`.
        answers: the unresolved answers, by the numbers of their questions.
        late: whether an answer is overdue. The caller that waited sets it; it is cleared when the
            peer answers or connects again.
        avoid_until: the time (monotonic) before which nothing is read from the peer.
    """

    def __init__(self, address: str, connect: Callable[[PeerLink], Peer]) -> None:
        self.address = address
        self.hello: Hello | None = None
        self.channel: Sender | None = None
        self.handle: PeerHandle | None = None
        self.refused: Exception | None = None
        self.is_self = False
        self.is_double = False
        self.users = 0
        self.answers: dict[int, Answer] = {}
        self.late = False
        self.avoid_until = -math.inf
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.peer = connect(self)

    def __repr__(self) -> str:
        return f"PeerLink({self.address!r}, ready={self.ready})"

    def ask(self, numbered: Callable[[int], Message]) -> Answer:
        """Sends the question that `numbered` makes with a new number; does not block.

        Returns:
            The answer; cancelled if the question cannot be sent, or when the connection is lost.
        """
        channel, number, answer = self.channel, next(self._numbers), Answer()
        with self._lock:
            self.answers[number] = answer
        if channel is None or not channel.send(numbered(number)):
            with self._lock:
                self.answers.pop(number, None)
            answer.cancel()
        return answer

    def answered(self, number: int, message: Message) -> None:
        """Stores `message` as the answer to the question `number`. Runs on the channel's thread."""
        self.late = False
        with self._lock:
            answer = self.answers.pop(number, None)
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_result(message)

    def forget_answers(self) -> None:
        """Cancels the open questions, which get no answer any more."""
        with self._lock:
            answers, self.answers = list(self.answers.values()), {}
        for answer in answers:
            answer.cancel()

    @property
    def ready(self) -> bool:
        """Returns whether the peer can be asked and read from."""
        return self.handle is not None and time.monotonic() >= self.avoid_until

    @property
    def attempts(self) -> int:
        """The number of attempts to connect to the peer."""
        return self.peer.attempts

    @property
    def error(self) -> Exception | None:
        """The error of the last attempt to connect; ``None`` if connected or not tried."""
        return None if self.handle is not None else self.refused or self.peer.error

    @property
    def tried(self) -> bool:
        """Returns whether an attempt to connect to the peer has ended, successful or not."""
        return self.is_self or self.is_double or self.handle is not None or self.error is not None


class Peers:
    """The connections to peers by address, kept open once they were used. Thread-safe.

    A connection that breaks is made again only while it has users, or when it next has one.

    Args:
        hello: returns this process's `Hello`.
        transport: the transport that reads blocks.
        heard: receives the address of a peer and each event of its channel except answers, after
            the link has changed; see `Deliver`.
        secret, timing: the secret and the times of the control channels; by default `Timing()`.
        accepts: called with a peer's `Hello`; raises `KvConnectError` if the peer does not fit.
        one_connection: of several links to one process only the first one stays connected, and
            none to this process. Otherwise all do, and share one handle.
        idle_after_s: unreachable peers are tried every 30 s once `ready` was not called for so
            long.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        transport: Transport,
        heard: Callable[[str, Sender, Event], None],
        *,
        secret: SharedSecret | None,
        timing: Timing | None = None,
        accepts: Callable[[Hello], None] = lambda _: None,
        one_connection: bool = False,
        idle_after_s: float = math.inf,
    ) -> None:
        self._hello = hello
        self._transport = transport
        self._heard = heard
        self._secret = secret
        self._timing = timing or Timing()
        self._accepts = accepts
        self._one_connection = one_connection
        self._idle_after_s = idle_after_s
        self._lock = threading.Lock()
        self._links: dict[str, PeerLink] = {}
        self._numbers = itertools.count(1)
        self._used_at = time.monotonic()

    # ------------------------------------------------------------------ which there are

    def use(self, address: str) -> PeerLink:
        """Returns the link to `address` with one more user; connects in the background.

        The caller ends its use with `leave` or `drop`.

        Raises:
            ConfigurationError: there is no secret for an address that needs one.
            RetryLater: too many peers are in use.
        """
        with self._lock:
            link = self._links.pop(address, None)
            if link is None:
                self._make_room()
                link = PeerLink(address, self._connect)
            elif not link.users and link.handle is None:
                link.peer.hurry()
            self._links[address] = link  # the last one is the one used last
            link.users += 1
            return link

    def leave(self, link: PeerLink) -> None:
        """Removes one user of `link`; the connection stays open while there is room."""
        with self._lock:
            link.users -= 1

    def drop(self, addresses: Iterable[str]) -> None:
        """Ends the connections to `addresses`, even if they have users. Does not block."""
        with self._lock:
            links = [self._links.pop(one) for one in addresses if one in self._links]
        for link in links:
            link.peer.close(timeout_s=0)

    def links(self) -> dict[str, PeerLink]:
        """Returns the links that are or should be connected, by address."""
        with self._lock:
            return dict(self._links)

    @property
    def room(self) -> int:
        """The number of links that can be added."""
        with self._lock:
            return _MAX_LINKS - len(self._links)

    def ready(self) -> list[PeerLink]:
        """Returns the links that can be asked and read from; tries the others more often now."""
        now = time.monotonic()
        idle, self._used_at = now > self._used_at + self._idle_after_s, now
        links = self.links().values()
        if idle:
            for link in links:
                if link.handle is None:
                    link.peer.hurry()
        return [link for link in links if link.ready]

    @property
    def connected(self) -> int:
        """The number of links that can be asked and read from now."""
        return sum(link.ready for link in self.links().values())

    def reconnect(self, reason: str) -> None:
        """Connects to all peers again. No handle is valid any more. Does not block."""
        with self._lock:
            links = list(self._links.values())
            for link in links:
                link.handle = None  # nor is it shared with one that connects before the others
        for link in links:
            link.peer.reconnect(reason)

    def close(self) -> None:
        """Ends all connections; blocks until they have ended."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.peer.close(timeout_s=0)
        for link in links:
            link.peer.close()
            link.forget_answers()

    def _connect(self, link: PeerLink) -> Peer:
        host, port = host_and_port(link.address)
        deliver: Deliver = partial(self._deliver, link)
        hello = partial(self._hello_of, next(self._numbers))
        endpoint = Endpoint(hello, deliver, self._secret, self._timing)
        return Peer(endpoint, host, port, longest_pause_s=partial(self._longest_pause_s, link))

    def _longest_pause_s(self, link: PeerLink) -> float | None:
        """Returns the longest pause before the next attempt to connect `link`, in seconds.

        ``None`` ends the attempts: `link` leads to this process, or has no users and is removed.
        """
        with self._lock:
            if link.is_self:
                return None
            if link.users:
                idle = link.is_double or time.monotonic() > self._used_at + self._idle_after_s
                return _IDLE_PAUSE_S if idle else self._timing.last_pause_s
            if self._links.get(link.address) is link:
                del self._links[link.address]
            return None

    def _make_room(self) -> None:
        """Ends the least recently used link without users if there are `_MAX_LINKS` links.

        Addresses may come from requests, so their number must be bounded.

        Raises:
            RetryLater: every link has users.
        """
        if len(self._links) < _MAX_LINKS:
            return
        idle = next((link for link in self._links.values() if link.users == 0), None)
        if idle is None:
            raise RetryLater(f"blocks are fetched from {_MAX_LINKS} engines already")
        del self._links[idle.address]
        idle.peer.close(timeout_s=0)

    def _hello_of(self, number: int) -> Hello:
        """Returns this process's `Hello` for the connection `number`.

        The number is a part of `engine_id`, so that a peer treats each connection as another
        reader. A peer known by two addresses would otherwise replace one connection by the other
        and end its leases.
        """
        hello = self._hello()
        return hello.model_copy(update={"engine_id": f"{hello.engine_id}/{number}"})

    # ------------------------------------------------------------------ on the channel's thread

    def _deliver(self, link: PeerLink, channel: Sender, event: Event) -> None:
        if isinstance(event, Connected):
            if not self._one_connection or self._is_first(link, channel, event.hello):
                self._connected(link, channel, event.hello)
                self._heard(link.address, channel, event)
        elif isinstance(event, Disconnected):
            with self._lock:
                handle, link.handle, link.channel = link.handle, None, None
                shared = any(other.handle is handle for other in self._links.values())
            link.forget_answers()
            if handle is not None and not shared:
                self._transport.disconnect(handle)
            self._heard(link.address, channel, event)  # whose listeners read the link
        elif isinstance(event, _ANSWERS):
            link.answered(event.seq, event)
        else:
            self._heard(link.address, channel, event)

    def _is_first(self, link: PeerLink, channel: Sender, hello: Hello) -> bool:
        """Sets `channel` for `link`, unless it leads to this process or to another link's peer.

        Returns whether `channel` was set; it is closed if not.
        """
        link.is_self = hello.engine_id == self._hello().engine_id
        with self._lock:
            link.is_double = any(
                other.hello is not None and other.hello.engine_id == hello.engine_id
                for other in self._links.values()
                if other is not link and other.channel is not None
            )
            if not link.is_self and not link.is_double:
                link.hello, link.channel = hello, channel
                return True
        if link.is_self:
            link.peer.close()
        channel.close("it is known by another name")
        return False

    def _connected(self, link: PeerLink, channel: Sender, hello: Hello) -> None:
        link.channel = channel
        try:
            self._accepts(hello)
            self._reach(link, hello)
        except KvConnectError as error:
            link.channel, link.refused = None, error
            raise
        link.refused, link.late = None, False

    def _reach(self, link: PeerLink, hello: Hello) -> None:
        """Connects the transport for `link`. Links to one process share its handle."""
        link.hello = hello
        with self._lock:
            for other in self._links.values():
                same = other.hello is not None and other.hello.local == hello.local
                if same and other.handle is not None:
                    link.handle = other.handle
                    return
        handle = self._transport.connect(hello.local)
        with self._lock:
            for other in self._links.values():
                now = other.handle
                if now is not None and now.incarnation == handle.incarnation:
                    other.handle = handle  # if two arrive at the same time, the later one is valid
            link.handle = handle
