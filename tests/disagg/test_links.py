"""Connections to the engines that are fetched from."""

from __future__ import annotations

import socket
import threading

import pytest
from engines import until

from kvconnect.errors import RetryLater
from kvconnect.transfer import peers as module
from kvconnect.transfer.control.endpoint import Timing
from kvconnect.transfer.leases.client import LeaseClient
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
    return Peers(lambda: None, None, None, lost=lambda *_: None, secret=None, timing=Timing())


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
        LeaseClient(),
        lost=lambda *_: None,
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
