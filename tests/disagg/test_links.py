"""Connections to the engines that are fetched from."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
from engines import until

from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.transfer import peers as module
from kvconnect.transfer.control.endpoint import Connected, Disconnected, Timing
from kvconnect.transfer.control.keyed import FindKeys, FoundKeys
from kvconnect.transfer.peers import Peers


class FakePeer:
    """A peer whose thread needs the end of all others: it is frozen, as they are."""

    made: list[FakePeer]

    def __init__(self, endpoint, host, port, *, longest_pause_s):
        self.told = threading.Event()
        self.attempts, self.error = 0, None
        self.made.append(self)

    def close(self, timeout_s=5.0):
        self.told.set()
        if timeout_s:
            assert all(peer.told.is_set() for peer in self.made), (
                "one waits before the next is told"
            )


@pytest.fixture
def links(monkeypatch):
    FakePeer.made = []
    monkeypatch.setattr(module, "Peer", FakePeer)
    return Peers(lambda: None, None, lambda *_: None, secret=None, timing=Timing())


def test_all_are_told_of_the_end_before_any_is_waited_for(links):
    for port in range(1, 5):
        links.use(f"127.0.0.1:{port}")
    links.close()
    assert all(peer.told.is_set() for peer in FakePeer.made)


def test_those_that_are_not_used_make_room(links):
    used = [links.use(f"127.0.0.1:{port}") for port in range(1, 65)]
    with pytest.raises(RetryLater):
        links.use("127.0.0.1:65")
    links.leave(used[5])
    assert links.use("127.0.0.1:65").users == 1
    assert used[5].peer.told.is_set()
    assert len(links._links) == 64


class FakeChannel:
    """A channel that takes what it is told while it is open."""

    def __init__(self):
        self.said, self.is_open = [], True

    def send(self, message):
        self.said.append(message)
        return self.is_open


def asks(link):
    return link.ask(lambda seq: FindKeys(seq=seq, keys=(b"k" * 32,)))


def test_a_question_ends_with_its_answer_or_with_its_connection(links):
    links._transport = SimpleNamespace(connect=lambda _: None)
    link, channel = links.use("127.0.0.1:1"), FakeChannel()
    assert asks(link).cancelled()
    links._deliver(link, channel, Connected(SimpleNamespace(local=b"")))
    first, second = asks(link), asks(link)
    links._deliver(link, channel, FoundKeys(seq=channel.said[1].seq, found=b"\1"))
    assert second.result(timeout=0).found == b"\1"
    assert not first.done()
    links._deliver(link, channel, Disconnected("lost"))
    assert first.cancelled()
    assert asks(link).cancelled()
    assert not link.answers


def test_a_peer_that_does_not_fit_is_not_read_from(links):
    def accepts(hello):
        raise ConfigurationError("pools")

    links._accepts = accepts
    link = links.use("127.0.0.1:1")
    with pytest.raises(ConfigurationError):
        links._deliver(link, FakeChannel(), Connected(SimpleNamespace(local=b"")))
    assert isinstance(link.error, ConfigurationError)
    assert (link.ready, link.channel) == (False, None)


QUICK = Timing(first_pause_s=0.01, last_pause_s=0.02)


@pytest.fixture
def nobody():
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def real_links():
    links = Peers(
        lambda: None,
        None,
        lambda *_: None,
        secret=None,
        timing=QUICK,
    )
    yield links
    links.close()


def test_an_engine_that_is_gone_is_tried_only_while_it_is_needed(real_links, nobody):
    link = real_links.use(nobody)
    until(lambda: link.attempts > 3)
    real_links.leave(link)
    until(lambda: not real_links._links and not link.peer._thread.is_alive())
    again = real_links.use(nobody)
    assert again is not link
    until(lambda: again.attempts > 3)


def test_one_that_is_needed_again_in_a_pause_is_tried_at_once(real_links, nobody, monkeypatch):
    monkeypatch.setattr(real_links, "_timing", Timing(first_pause_s=60, last_pause_s=60))
    link = real_links.use(nobody)
    until(lambda: link.error is not None)
    real_links.leave(link)
    assert real_links.use(nobody) is link
    until(lambda: link.attempts == 2)
