"""The peers that this instance reads from: connections, questions and their answers."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial

from kvconnect.address import host_and_port
from kvconnect.errors import ConfigurationError, PeerRefused, RetryLater
from kvconnect.trace import count, warn_once
from kvconnect.transfer.control.endpoint import Endpoint, Timing
from kvconnect.transfer.control.events import Connected, Deliver, Disconnected, Event, Sender
from kvconnect.transfer.control.keyed import (
    FindChildren,
    FindKeys,
    ForgetKeys,
    ForgotKeys,
    FoundChildren,
    FoundKeys,
)
from kvconnect.transfer.control.messages import Hello, Message
from kvconnect.transfer.control.peer import Peer
from kvconnect.transfer.leases.client import LeaseClient
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.transport import PeerHandle, Transport

__all__ = ["Answer", "Link", "Links"]

Answer = Future[Message]
"""Of a question; is cancelled when the connection is lost."""

_MAX_LINKS = 64
# A peer whose blocks were not what it said is not read from for so long.
_AVOID_S = 30.0
_POLL_S = 0.01
# Between attempts to connect while the store is used, and while it was not for so long.
_PAUSE_S, _IDLE_PAUSE_S, _IDLE_AFTER_S = 2.0, 30.0, 10.0


class Link:
    """One peer, and what is known of it.

    Attributes:
        address: ``host:port`` of its control channel; its name among the leases, too.
        handle: for reads from it; ``None``: it is not connected.
        is_connected: its channel is open, and no other link is to the same instance.
        late: it has not answered in time of late, so nothing waits for it until it does.
        is_self: it is this very instance.
        instance: what the peer calls itself; ``None``: it was never connected.
        double: the name of the link to the same instance under another address; ``None``: there is
            none.
        refused: why it was not connected to, although it answered.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.peer: Peer | None = None
        self.channel: Sender | None = None
        self.handle: PeerHandle | None = None
        self.is_connected = False
        self.late = False
        self.is_self = False
        self.instance: str | None = None
        self.double: str | None = None
        self.refused: Exception | None = None
        self.answers: dict[int, Answer] = {}
        self._avoid_until = float("-inf")

    def __repr__(self) -> str:
        return f"Link({self.address!r}, ready={self.ready})"

    @property
    def ready(self) -> bool:
        """Whether it can be asked and read from."""
        return self.handle is not None and time.monotonic() >= self._avoid_until

    @property
    def error(self) -> Exception | None:
        """Why it could not be connected to last."""
        return self.refused or (None if self.peer is None else self.peer.error)

    @property
    def tried(self) -> bool:
        """Whether it was tried to connect to it, and how that ended is known."""
        known = self.is_self or self.double is not None
        return known or self.handle is not None or self.error is not None

    def avoid(self, reason: str) -> None:
        """Reads nothing from it for a while."""
        count("store.nixl.avoided")
        warn_once(f"nixl.avoid {self.address}", f"peer {self.address} is left alone: {reason}")
        self._avoid_until = time.monotonic() + _AVOID_S


class Links:
    """Connections to peers, kept open. Thread-safe; nothing blocks but `wait` and `close`.

    Args:
        hello: what this instance says of itself.
        transport: that blocks travel by.
        client: of the leases; told of what peers say.
        secret: of the control channels.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        transport: Transport,
        client: LeaseClient,
        *,
        secret: SharedSecret | None,
    ) -> None:
        self._hello = hello
        self._transport = transport
        self._client = client
        self._secret = secret
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._links: dict[str, Link] = {}
        self._closed = False
        self._used_at = time.monotonic()

    # ------------------------------------------------------------------ which there are

    def connect(self, addresses: Collection[str], replaceable: Collection[str] = ()) -> None:
        """Connects to those of `addresses` that it is not connected to, in the background.

        Where there is no room for all, chance decides.

        Args:
            addresses: of peers.
            replaceable: those whose place another one may take once they turned out to be of no
                use.
        """
        with self._lock:
            new = [one for one in addresses if one not in self._links and not self._closed]
            random.shuffle(new)
            useless = [one for one in replaceable if self._is_useless(one)]
            wanting = max(0, len(new) - (_MAX_LINKS - len(self._links)))
            given_up = [self._links.pop(one) for one in useless[:wanting]]
            room = _MAX_LINKS - len(self._links)
            for address in new[:room]:
                try:
                    self._links[address] = self._link(address)
                except ConfigurationError as error:  # an address of the directory
                    warn_once("nixl.peer", f"peer {address} is left out: {error}")
        for link in given_up:
            if link.peer is not None:
                link.peer.close(timeout_s=0)
        if len(new) > room:
            warn_once("nixl.links", f"{len(new) - room} peers are left out: {_MAX_LINKS} are used")

    def _is_useless(self, address: str) -> bool:
        link = self._links.get(address)
        return link is not None and not link.is_connected and link.tried

    def _link(self, address: str) -> Link:
        link = Link(address)
        deliver: Deliver = partial(self._deliver, link)
        hello = partial(self._hello_of, next(self._numbers))
        endpoint = Endpoint(hello, deliver, self._secret, Timing())
        link.peer = Peer(
            endpoint, *host_and_port(address), longest_pause_s=lambda: self._longest_pause_s(link)
        )
        return link

    def _longest_pause_s(self, link: Link) -> float | None:
        if link.is_self:
            return None
        idle = link.double is not None or time.monotonic() > self._used_at + _IDLE_AFTER_S
        return _IDLE_PAUSE_S if idle else _PAUSE_S

    def _hello_of(self, number: int) -> Hello:
        """Returns what this instance says of itself on the connections of one link.

        An instance may be known by two names. It takes each link for another reader: so the one
        does not take the other's place, before the second is given up.
        """
        hello = self._hello()
        return hello.model_copy(update={"engine_id": f"{hello.engine_id}/{number}"})

    def drop(self, addresses: Collection[str]) -> None:
        """Lets go of the peers at `addresses`; does not block."""
        with self._lock:
            links = [self._links.pop(one) for one in addresses if one in self._links]
        for link in links:
            if link.peer is not None:
                link.peer.close(timeout_s=0)

    def addresses(self) -> list[str]:
        """Those that it is or should be connected to."""
        with self._lock:
            return list(self._links)

    def ready(self) -> list[Link]:
        """Peers that can be asked and read from; the others are tried more often from now on."""
        now = time.monotonic()
        idle, self._used_at = now > self._used_at + _IDLE_AFTER_S, now
        with self._lock:
            if idle:
                for link in self._links.values():
                    if link.handle is None and link.peer is not None:
                        link.peer.hurry()
            return [link for link in self._links.values() if link.ready]

    @property
    def connected(self) -> int:
        """How many peers can be asked and read from."""
        with self._lock:
            return sum(link.ready for link in self._links.values())

    def wait(self, timeout_s: float) -> None:
        """Blocks until it was tried to connect to each, `timeout_s` at most.

        Raises:
            ConfigurationError: a peer does not fit: another secret, transport or version.
        """
        until = time.monotonic() + timeout_s
        with self._lock:
            links = list(self._links.values())
        for link in links:
            while not link.tried and time.monotonic() < until:
                time.sleep(_POLL_S)
            if isinstance(link.error, PeerRefused):
                raise ConfigurationError(f"peer {link.address}: {link.error}") from link.error

    def reconnect(self, reason: str) -> None:
        """Connects to all anew."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            if link.peer is not None:
                link.peer.reconnect(reason)

    def close(self) -> None:
        """Ends all connections; blocks until they have ended."""
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            if link.peer is not None:
                link.peer.close(timeout_s=0)  # all begin to end
        for link in links:
            if link.peer is not None:
                link.peer.close()
            self._drop_answers(link)

    # ------------------------------------------------------------------ what they are asked

    def find(self, link: Link, keys: Collection[bytes]) -> Answer | None:
        """Asks which of `keys` it has; ``None``: it cannot be asked."""
        number = next(self._numbers)
        return self._ask(link, number, FindKeys(seq=number, keys=tuple(keys)))

    def children(self, link: Link, parent: bytes | None) -> Answer | None:
        """Asks which blocks it has that follow `parent`; ``None``: it cannot be asked."""
        number = next(self._numbers)
        return self._ask(link, number, FindChildren(seq=number, parent=parent))

    def forget(self, link: Link, keys: Collection[bytes]) -> Answer | None:
        """Asks it to drop `keys`; ``None``: it cannot be asked."""
        number = next(self._numbers)
        return self._ask(link, number, ForgetKeys(seq=number, keys=tuple(keys)))

    def _ask(self, link: Link, number: int, message: Message) -> Answer | None:
        channel, answer = link.channel, Answer()
        if channel is None:
            return None
        with self._lock:
            link.answers[number] = answer
        if channel.send(message):
            return answer
        with self._lock:
            link.answers.pop(number, None)
        return None

    # ------------------------------------------------------------------ on the channel's thread

    def _deliver(self, link: Link, channel: Sender, event: Event) -> None:
        if isinstance(event, Connected):
            self._connected(link, channel, event.hello)
        elif isinstance(event, Disconnected):
            handle, link.handle, link.channel = link.handle, None, None
            link.is_connected = False
            self._drop_answers(link)
            if handle is not None:
                self._transport.disconnect(handle)
            self._client.disconnected(link.address, channel.send)  # whose listeners look at it
        elif isinstance(event, (FoundKeys, ForgotKeys, FoundChildren)):
            link.late = False
            with self._lock:
                answer = link.answers.pop(event.seq, None)
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_result(event)
        else:
            self._client.handle(event, link.address)

    def _connected(self, link: Link, channel: Sender, hello: Hello) -> None:
        if hello.engine_id == self._hello().engine_id:
            link.is_self = True
            with self._lock:
                peer = link.peer
            if peer is not None:
                peer.close()
            return
        with self._lock:
            link.instance = hello.engine_id
            same = [one for one in self._links.values() if one.instance == link.instance]
            first = next((one for one in same if one is not link and one.is_connected), None)
            link.double = None if first is None else first.address
            link.is_connected = first is None
        if first is not None:
            channel.close("it is known by another name")
            return
        try:
            handle = self._transport.connect(hello.local)
        except (ConfigurationError, RetryLater) as error:
            link.refused, link.is_connected = error, False
            raise
        link.refused, link.late = None, False
        self._client.connected(link.address, channel.send)
        link.channel, link.handle = channel, handle

    def _drop_answers(self, link: Link) -> None:
        with self._lock:
            answers, link.answers = list(link.answers.values()), {}
        for answer in answers:
            answer.cancel()
            answer.set_running_or_notify_cancel()
