"""Pulls, their deadlines, and the quarantine of what is not terminal."""

from __future__ import annotations

import socket
import threading

import pytest
from endpoints import NoThread
from waiting import until

from kvconnect import trace
from kvconnect.errors import ConfigurationError, PullFailed
from kvconnect.trace import Metrics
from kvconnect.transfer import pull as pulls
from kvconnect.transfer import quarantine as quarantine_module
from kvconnect.transfer.pull import Deadlines
from kvconnect.transfer.quarantine import Quarantine
from kvconnect.transfer.tcp.tcp_pull import Share, TcpPull
from kvconnect.transfer.transport import PeerHandle, Pull


def test_a_finished_pull_is_terminal_before_it_is_done():
    pull = Pull(1)
    seen = []
    pull.done.add_done_callback(lambda _: seen.append(pull.terminal.is_set()))
    assert not pull.done.cancel()
    pull.finish()
    pull.finish(PullFailed("peer", "late"))
    pull.abandon()
    assert seen == [True]
    assert pull.done.exception() is None


def test_an_abandoned_pull_fails_once_and_is_not_terminal_yet():
    pull = Pull(1)
    called = []
    pull.terminal.add_callback(lambda: called.append(1))
    pull.done.add_done_callback(lambda _: pull.abandon())
    pull.abandon()
    with pytest.raises(PullFailed, match="abandoned"):
        pull.done.result(0)
    assert not pull.terminal.wait(0)
    assert not called
    pull.finish()
    pull.terminal.add_callback(lambda: called.append(2))
    assert called == [1, 2]


def test_each_pull_is_counted_once_before_it_is_done(monkeypatch):
    counted = Metrics()
    for module in (trace, pulls):
        monkeypatch.setattr(module, "metrics", counted)
    pull = Pull(5)
    pull.done.add_done_callback(lambda _: seen.append(counted.snapshot()["transfer.pull.bytes"]))
    seen: list[float] = []
    pull.finish()
    pull.abandon()
    assert seen == [5]
    for error in (PullFailed("deadline", "late"), PullFailed("peer", "dead")):
        pull = Pull(7)
        pull.fail(error)
        pull.finish()
    told = counted.snapshot()
    assert told.pop("transfer.pull.seconds") > 0
    assert told == {
        "transfer.pull": 3,
        "transfer.pull.bytes": 5,
        "transfer.pull.errors": 2,
        "transfer.pull.deadline": 1,
        "transfer.pull.peer": 1,
    }


def test_deadlines_come_in_their_order_whatever_that_of_the_pulls():
    deadlines = Deadlines()
    failed = []
    pulls = {seconds: Pull(1) for seconds in (0.3, 0.05, 0.15, 30.0)}
    for seconds, pull in pulls.items():
        pull.done.add_done_callback(lambda _, seconds=seconds: failed.append(seconds))
        deadlines.watch(pull, seconds)
    with pytest.raises(PullFailed, match=r"within 0\.3 s"):
        pulls[0.3].done.result(60)
    assert failed == [0.05, 0.15, 0.3]
    deadlines.close()
    assert not pulls[30.0].done.done()


def test_pulls_that_are_done_are_not_kept_until_their_deadline():
    deadlines = Deadlines()
    for _ in range(1000):
        pull = Pull(1)
        deadlines.watch(pull, 3600)
        pull.finish()
    assert not deadlines._pulls
    deadlines.close()


@pytest.fixture(autouse=True)
def no_rebuild_goes_on():
    """Fails if a thread of the test still rebuilds: it would count in the tests after it."""
    yield
    for thread in threading.enumerate():
        if thread.name == "kvconnect-rebuild":
            thread.join(10)
            assert not thread.is_alive()


PEER, OTHER = (PeerHandle(name, "0" * 32, ()) for name in ("peer", "other"))


def test_blocks_are_counted_until_their_pull_is_terminal():
    rebuilt = []
    quarantine = Quarantine(10, lambda: rebuilt.append(1))
    pull = Pull(1)
    pull.abandon()
    quarantine.hold(pull, PEER, 4)
    assert quarantine.quarantined == 4
    assert quarantine.accepts(PEER)
    pull.finish()
    assert quarantine.quarantined == 0
    quarantine.hold(pull, PEER, 20)
    assert quarantine.quarantined == 0
    assert not rebuilt


def test_at_the_bound_a_rebuild_frees_what_is_held_and_the_peer_is_left_alone():
    begun, go_on = threading.Event(), threading.Event()
    held = [Pull(1) for _ in range(3)]

    def rebuild():
        begun.set()
        go_on.wait(60)
        for pull in held:
            pull.finish()

    quarantine = Quarantine(10, rebuild)
    for pull in held:
        pull.abandon()
        quarantine.hold(pull, PEER, 4)
    assert begun.wait(60)
    assert not quarantine.accepts(PEER)
    go_on.set()
    until(lambda: quarantine.accepts(PEER))
    assert quarantine.quarantined == 0


def test_what_is_free_a_moment_later_needs_no_rebuild():
    """Which would end the reads from all other peers, too."""
    rebuilt = []
    quarantine = Quarantine(10, lambda: rebuilt.append(1))
    pull = Pull(1)
    pull.abandon()
    quarantine.hold(pull, PEER, 20)
    assert not quarantine.accepts(PEER)
    assert quarantine.accepts(OTHER)
    pull.finish()
    for thread in threading.enumerate():
        if thread.name == "kvconnect-rebuild":
            thread.join(60)
    assert not rebuilt
    assert quarantine.accepts(PEER)


def test_a_rebuild_that_fails_is_tried_again_and_other_peers_are_still_read_from(monkeypatch):
    monkeypatch.setattr(quarantine_module, "_AGAIN_S", 0.01)
    tried, mended = threading.Semaphore(0), threading.Event()

    def rebuild():
        tried.release()
        if not mended.is_set():
            raise ConfigurationError("no backend")

    quarantine = Quarantine(2, rebuild)
    quarantine.hold(Pull(1), PEER, 2)
    assert tried.acquire(timeout=60)
    while not quarantine.accepts(OTHER):
        pass
    assert not quarantine.accepts(PEER)
    quarantine.hold(Pull(1), PEER, 1)
    assert tried.acquire(timeout=60)
    mended.set()


def test_a_rebuild_that_failed_is_tried_again_although_nothing_is_held_any_more(monkeypatch):
    """It ended what was read, and left a transport that reads nothing: no other will be held."""
    monkeypatch.setattr(quarantine_module, "_AGAIN_S", 0.001)
    pull, tries, rebuilt = Pull(1), iter(range(3)), threading.Event()

    def rebuild():
        pull.finish()
        if next(tries) < 2:
            raise ConfigurationError("the port is taken")
        rebuilt.set()

    quarantine = Quarantine(2, rebuild)
    quarantine.hold(pull, PEER, 2)
    assert rebuilt.wait(60)
    until(lambda: quarantine.accepts(PEER))


def test_a_rebuild_without_a_thread_is_tried_with_the_next(monkeypatch):
    rebuilt = threading.Event()
    quarantine = Quarantine(2, rebuilt.set)
    with monkeypatch.context() as patch:
        patch.setattr(quarantine_module.threading, "Thread", NoThread)
        quarantine.hold(Pull(1), PEER, 2)
    assert quarantine.accepts(OTHER)
    quarantine.hold(Pull(1), PEER, 2)
    assert rebuilt.wait(60)


def test_shares_that_run_are_cut_and_waited_for_once_one_has_failed():
    pull = TcpPull(2)
    shares = [Share(pull, 0, None, 0, None, 0) for _ in range(3)]
    pull.expect(shares)
    (one, other), (two, end) = socket.socketpair(), socket.socketpair()
    with one, other, two, end:
        end.settimeout(10)
        assert pull.begin(shares[0], one)
        assert pull.begin(shares[1], two)
        pull.end(shares[0], PullFailed("peer", "gone"))
        assert end.recv(1) == b""
        assert not pull.terminal.is_set()
        assert not pull.begin(shares[2], one)
        pull.end(shares[1])
        assert pull.terminal.is_set()
        assert isinstance(pull.done.exception(0), PullFailed)
