"""The engines that this one fetches from."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvconnect.address import host_and_port
from kvconnect.errors import KvConnectError, RetryLater
from kvconnect.transfer.control.digests import FoundDigest
from kvconnect.transfer.control.endpoint import Endpoint, Timing
from kvconnect.transfer.control.events import Connected, Deliver, Disconnected, Event, Sender
from kvconnect.transfer.control.messages import Hello, Message
from kvconnect.transfer.control.peer import Peer
from kvconnect.transfer.leases.client import LeaseClient
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.transport import PeerHandle, Transport

__all__ = ["Answer", "PeerLink", "Peers"]

Answer = Future[Message]
"""The answer to a question; is cancelled when the connection is lost."""

_MAX_LINKS = 64


class PeerLink:
    """One engine that this one fetches from, and what is known of it.

    Attributes:
        address: ``host:port`` of its control channel; its name among the leases, too.
        hello: what it said of itself last.
        handle: for reads from it; ``None``: it is not connected.
        users: claims on it that are not over.
        answers: of questions that were asked and are not answered, by their numbers.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.peer: Peer | None = None
        self.hello: Hello | None = None
        self.handle: PeerHandle | None = None
        self.refused: Exception | None = None
        self.users = 0
        self.answers: dict[int, Answer] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def ask(self, numbered: Callable[[int], Message]) -> Answer:
        """Sends the question that `numbered` makes with a number; does not block.

        Returns:
            Its answer; cancelled if it cannot be asked, or when the connection is lost.
        """
        number, answer = next(self._numbers), Answer()
        with self._lock:
            self.answers[number] = answer
        if self.peer is None or not self.peer.send(numbered(number)):
            with self._lock:
                self.answers.pop(number, None)
            answer.cancel()
        return answer

    def answered(self, number: int, message: Message) -> None:
        """Takes `message` for the answer to the question `number`; on the channel's thread."""
        with self._lock:
            answer = self.answers.pop(number, None)
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_result(message)

    def forget_answers(self) -> None:
        """Cancels what was asked: no answer comes any more."""
        with self._lock:
            answers, self.answers = list(self.answers.values()), {}
        for answer in answers:
            answer.cancel()

    @property
    def attempts(self) -> int:
        """How often it was tried to connect to it."""
        return 0 if self.peer is None else self.peer.attempts

    @property
    def error(self) -> Exception | None:
        """Why it could not be connected to last; ``None``: it is connected, or was not tried."""
        if self.peer is None or self.handle is not None:
            return None
        return self.refused or self.peer.error


class Peers:
    """Connections to engines by their address, kept open once they were asked for.

    One that breaks is made anew only while a claim needs it, or when one does next.

    Args:
        hello: what this engine says of itself.
        transport: that blocks travel by.
        client: of the leases; told of what peers say.
        lost: called on a channel's thread when a connection has ended; must not block.
        secret, timing: of the control channel.
        accepts: called with what a peer says of itself; raises `KvConnectError` if it does not fit.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        transport: Transport,
        client: LeaseClient,
        *,
        lost: Callable[[PeerLink, str], None],
        secret: SharedSecret | None,
        timing: Timing,
        accepts: Callable[[Hello], None] = lambda _: None,
    ) -> None:
        self._hello = hello
        self._accepts = accepts
        self._transport = transport
        self._client = client
        self._lost = lost
        self._secret = secret
        self._timing = timing
        self._lock = threading.Lock()
        self._links: dict[str, PeerLink] = {}
        self._numbers = itertools.count(1)

    def use(self, address: str) -> PeerLink:
        """The engine at `address`, to be given back with `leave`; connects in the background.

        Raises:
            ConfigurationError: there is no secret for an address that needs one.
            RetryLater: too many engines are in use.
        """
        with self._lock:
            link = self._links.pop(address, None)
            if link is None:
                self._make_room()
                link = PeerLink(address)
                host, port = host_and_port(address)
                deliver: Deliver = partial(self._deliver, link)
                hello = partial(self._hello_of, next(self._numbers))
                endpoint = Endpoint(hello, deliver, self._secret, self._timing)
                link.peer = Peer(
                    endpoint, host, port, longest_pause_s=partial(self._longest_pause_s, link)
                )
            elif not link.users and link.handle is None and link.peer is not None:
                link.peer.hurry()
            self._links[address] = link  # the last one is the one used last
            link.users += 1
            return link

    def leave(self, link: PeerLink) -> None:
        """One claim on `link` less."""
        with self._lock:
            link.users -= 1

    def _longest_pause_s(self, link: PeerLink) -> float | None:
        """As `Peer` asks; what it is told to give up is not used any more."""
        with self._lock:
            if link.users:
                return self._timing.last_pause_s
            if self._links.get(link.address) is link:
                del self._links[link.address]
            return None

    def _make_room(self) -> None:
        """Addresses come from requests: those that are not used any more are let go of."""
        if len(self._links) < _MAX_LINKS:
            return
        idle = next((link for link in self._links.values() if link.users == 0), None)
        if idle is None or idle.peer is None:
            raise RetryLater(f"blocks are fetched from {_MAX_LINKS} engines already")
        del self._links[idle.address]
        idle.peer.close(timeout_s=0)

    def reconnect(self, reason: str) -> None:
        """Connects to all engines anew; no handle is of use any more. Does not block."""
        with self._lock:
            links = list(self._links.values())
            for link in links:
                link.handle = None  # nor is it shared with one that connects before the others
        for link in links:
            if link.peer is not None:
                link.peer.reconnect(reason)

    @property
    def connected(self) -> int:
        """How many engines blocks can be fetched from now."""
        with self._lock:
            return sum(link.handle is not None for link in self._links.values())

    def close(self) -> None:
        """Ends all connections; blocks until they have ended."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        peers = [link.peer for link in links if link.peer is not None]
        for peer in peers:
            peer.close(timeout_s=0)
        for peer in peers:
            peer.close()

    def _hello_of(self, number: int) -> Hello:
        """What it says of itself on the connection `number`.

        One engine may be known by two names. To it, each connection is another reader: the one
        would take the other's place, and end its leases.
        """
        hello = self._hello()
        return hello.model_copy(update={"engine_id": f"{hello.engine_id}/{number}"})

    def _deliver(self, link: PeerLink, channel: Sender, event: Event) -> None:
        """On the channel's thread."""
        if isinstance(event, Connected):
            try:
                self._accepts(event.hello)
                self._reach(link, event.hello)
            except KvConnectError as error:
                link.refused = error
                raise
            link.refused = None
            self._client.connected(link.address, channel.send)
        elif isinstance(event, Disconnected):
            link.forget_answers()
            with self._lock:
                handle, link.handle = link.handle, None
                shared = any(other.handle is handle for other in self._links.values())
            if handle is not None and not shared:
                self._transport.disconnect(handle)
            self._lost(link, event.reason)
            self._client.disconnected(link.address, channel.send)  # whose listeners look at both
        elif isinstance(event, FoundDigest):
            link.answered(event.seq, event)
        else:
            self._client.handle(event, link.address)

    def _reach(self, link: PeerLink, hello: Hello) -> None:
        """Makes reads by `link` possible. Connections to one engine share its handle."""
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
                    other.handle = handle  # of two at the same time, the later one is valid
            link.handle = handle
