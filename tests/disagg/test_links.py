"""Connections to the engines that are fetched from."""

from __future__ import annotations

import threading

import pytest

from kvconnect.connector.disagg import links as module
from kvconnect.connector.disagg.links import Links
from kvconnect.errors import RetryLater
from kvconnect.transfer.control.endpoint import Timing


class FakePeer:
    """A peer whose thread needs the end of all others: it is frozen, as they are."""

    made: list[FakePeer]

    def __init__(self, endpoint, host, port):
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
    return Links(lambda: None, None, None, lost=lambda *_: None, secret=None, timing=Timing())


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
