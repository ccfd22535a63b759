"""Leases over real channels; sides that die or freeze are in ``tests/disagg/test_processes.py``."""

from __future__ import annotations

import queue
import threading
import weakref
from contextlib import closing
from functools import partial

import pytest
import torch
from endpoints import Side, opened, until

from kvconnect.errors import DuplicateRequest
from kvconnect.transfer.claims import LeaseClient
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.messages import (
    Abort,
    Claim,
    Expired,
    Grant,
    Release,
    Unknown,
    Watermark,
    WatermarkOf,
)
from kvconnect.transfer.control.peer import Peer
from kvconnect.transfer.leases.held import Outcome
from kvconnect.transfer.leases.server import LeaseServer
from kvconnect.transfer.leases.timer import Timer, lease_clock

LEASE_S = 2.0
"""Of tests in which a lease is renewed or ends."""
short = pytest.mark.parametrize("lease_s", [LEASE_S])


@pytest.fixture
def lease_s():
    return 60.0


@pytest.fixture
def p(lease_s):
    """P in this process: its server, its port, and what it was told to unpin."""
    unpinned: queue.Queue = queue.Queue()

    def unpin(ended):
        for one in ended:
            unpinned.put(one)

    with closing(LeaseServer(unpin, max_lease_total=1000, lease_s=lease_s)) as server:
        server.start()
        side = Side("P", deliver=server.deliver)
        with Listener(side.endpoint) as listening:
            yield server, listening.port, unpinned


@pytest.fixture
def d():
    """D in this process: its client, and how to connect it."""
    with closing(LeaseClient()) as client:
        client.start()
        side = Side("D", deliver=partial(client.deliver, "P"))
        peers = []

        def connect(port: int) -> Peer:
            peers.append(Peer(side.endpoint, "127.0.0.1", port))
            assert opened(peers[-1])
            return peers[-1]

        yield client, connect
        for peer in peers:
            peer.close()


def test_what_is_read_and_released_is_valid_and_unpinned_at_once(p, d):
    server, port, unpinned = p
    client, connect = d
    connect(port)
    key = server.offer("r", tokens=64, nbytes=100, blocks=((1, 2),))
    claimed = client.claim("P", "r")
    until(claimed.lease.may_read)
    assert claimed.blocks == ((1, 2),)
    server.advance(key, Watermark(tokens=64, layers=1), ((3,),))
    until(lambda: claimed.mark == Watermark(tokens=64, layers=1))
    assert claimed.blocks == ((1, 2, 3),)
    assert client.release(claimed) is Outcome.VALID
    assert len(client) == 0
    ended = unpinned.get(timeout=60)
    assert (ended.key, ended.why) == (key, "released")


@short
def test_renewals_hold_it_for_as_long_as_it_is_needed(p, d):
    server, port, unpinned = p
    client, connect = d
    connect(port)
    server.offer("r", tokens=64, nbytes=100)
    claimed = client.claim("P", "r")
    until(claimed.lease.may_read)
    first = claimed.lease.end
    until(lambda: claimed.lease.end > first + LEASE_S / 2)
    assert unpinned.empty()
    assert client.release(claimed) is Outcome.VALID


def test_an_abort_by_either_side_is_heard_by_the_other(p, d):
    server, port, unpinned = p
    client, connect = d
    connect(port)
    keys = [server.offer(name, tokens=64, nbytes=100) for name in "ab"]
    first, second = (client.claim("P", name) for name in "ab")
    until(lambda: first.lease.may_read() and second.lease.may_read())
    assert client.abort(first, "the client went away") is Outcome.INVALID
    ended = unpinned.get(timeout=60)
    assert (ended.key, ended.why) == (keys[0], "aborted")
    server.withdraw(keys[1], "its request was aborted")
    until(lambda: second.lease.lost)
    assert second.lease.lost == "its request was aborted"
    assert second.lease.outcome is Outcome.OPEN
    assert client.abort(second) is Outcome.INVALID


def test_what_was_lost_with_a_connection_is_told_again(p, d):
    server, port, _ = p
    client, connect = d
    peer = connect(port)
    key = server.offer("r", tokens=64, nbytes=100, blocks=((1,),))
    claimed = client.claim("P", "r")
    until(claimed.lease.may_read)
    peer.reconnect()
    until(lambda: not server._senders)
    server.advance(key, Watermark(tokens=64, layers=2), ((2,),))
    until(lambda: claimed.mark == Watermark(tokens=64, layers=2))
    assert claimed.blocks == ((1, 2),)


# ------------------------------------------------------------------------------ single parts


def test_a_claim_that_waited_long_is_unknown(clock):
    said: list = []
    server = LeaseServer(len, max_lease_total=10, claim_wait_s=30, clock=clock)
    server.handle(Claim(seq=4, request="r"), "D", said.append)
    assert server.reap() == 80
    clock.now = 80
    assert server.reap() is None
    assert said == [Unknown(seq=4, request="r")]


@pytest.mark.parametrize("how", ["aborts", "waits too long"])
def test_who_waited_for_an_offer_and_let_go_is_not_waited_for(how, clock):
    unpinned: list = []
    server = LeaseServer(unpinned.extend, max_lease_total=10, claim_wait_s=30, clock=clock)
    for holder in ("D0", "D1"):
        server.handle(Claim(seq=1, request="r", readers=2), holder, lambda _: True)
        if how == "aborts":
            server.handle(Abort(request="r", reason="done"), holder, lambda _: True)
    clock.now += 30
    server.reap()
    server.offer("r", tokens=1, nbytes=1)
    server.reap()
    assert [one.why for one in unpinned] == ["aborted"]
    # Nothing of it is remembered for another offer of that name.
    server.offer("r", tokens=1, nbytes=1)
    server.reap()
    assert len(server.table) == 1


def test_if_one_of_two_readers_let_go_the_other_is_waited_for():
    said: list = []
    server = LeaseServer(len, max_lease_total=10)
    server.handle(Claim(seq=1, request="r", readers=2), "D1", said.append)
    server.handle(Abort(request="r", reason="done"), "D1", said.append)
    key = server.offer("r", tokens=1, nbytes=1)
    server.reap()
    assert len(server.table) == 1
    server.handle(Claim(seq=2, request="r", readers=2), "D0", said.append)
    server.handle(Release(seq=3, request="r", epoch=key.epoch), "D0", said.append)
    server.reap()
    assert not len(server.table)


def test_who_let_go_and_claims_again_is_answered():
    said: list = []
    server = LeaseServer(len, max_lease_total=10)
    for message in (Claim(seq=1, request="r"), Abort(request="r"), Claim(seq=2, request="r")):
        server.handle(message, "D", said.append)
    server.offer("r", tokens=1, nbytes=1)
    assert [type(one) for one in said] == [Grant]
    server.reap()
    assert len(server.table) == 1


def test_who_let_go_is_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr("kvconnect.transfer.leases.lease._MAX_READERS", 50)
    server = LeaseServer(len, max_lease_total=10)

    def lets_go(request, reader):
        server.handle(Claim(seq=1, request=request), f"D{reader}", lambda _: True)
        server.handle(Abort(request=request, reason="done"), f"D{reader}", lambda _: True)

    for number in range(12):
        for reader in range(20):
            lets_go(str(number), reader)
    assert 50 - 20 < len(server._let_go) <= 50
    server.handle(Claim(seq=1, request="11"), "D0", lambda _: True)
    assert set(server._let_go.pop("11")) == {f"D{reader}" for reader in range(1, 20)}
    assert not server._let_go.pop("0")
    monkeypatch.undo()
    for reader in range(100):
        lets_go("r", reader)
    assert len(server._let_go.pop("r")) == 64


def test_claims_that_wait_are_bounded_and_end_with_their_channel(monkeypatch):
    monkeypatch.setattr("kvconnect.transfer.leases.server._MAX_WAITING", 5)
    said: list = []
    server = LeaseServer(len, max_lease_total=10)
    for number in range(6):
        server.handle(Claim(seq=1, request=str(number)), "D", said.append)
    assert said == [Unknown(seq=1, request="5")]
    server.disconnected("D", said.append)
    assert not server._waiting


@pytest.mark.parametrize("kind", [Abort, Release])
def test_what_an_earlier_connection_said_is_late_and_ends_nothing(kind):
    """P's thread of the lost connection may be slower than that of the one that followed."""
    server = LeaseServer(lambda _: None, max_lease_total=1000)
    said: list = []
    earlier, later = Ways(said), Ways(said)
    epoch = server.offer("r", tokens=1, nbytes=1).epoch
    server.connected("D", earlier.send)
    server.handle(Claim(seq=1, request="r"), "D", earlier.send)
    server.connected("D", later.send)
    server.handle(Claim(seq=2, request="r"), "D", later.send)
    fields = {"request": "r", "epoch": epoch} | ({"seq": 3} if kind is Release else {})
    server.handle(kind(**fields), "D", earlier.send)
    assert [type(one) for one in said] == [Grant, Grant]
    assert not server.table.take_ended()
    server.handle(kind(**fields), "D", later.send)
    assert len(server.table.take_ended()) == 1


class Ways:
    """A connection's end, each another one."""

    def __init__(self, said: list) -> None:
        self._said = said

    def send(self, message) -> bool:
        self._said.append(message)
        return True


def test_a_claim_of_an_epoch_does_not_wait():
    said: list = []
    server = LeaseServer(len, max_lease_total=10)
    server.handle(Claim(seq=1, request="r", epoch=3), "D", said.append)
    assert said == [Unknown(seq=1, request="r", epoch=3)]
    key = server.offer("r", tokens=1, nbytes=1)
    server.withdraw(key)
    server.handle(Claim(seq=2, request="r", epoch=key.epoch), "D", said.append)
    assert said[1:] == [Expired(seq=2, request="r", epoch=key.epoch)]


def test_what_could_not_be_unpinned_is_handed_over_again():
    handed: list = []

    def unpin(ended):
        handed.append([one.key for one in ended])
        if len(handed) == 1:
            raise OSError("the inbox is closed for a moment")

    server = LeaseServer(unpin, max_lease_total=10)
    key = server.offer("r", tokens=1, nbytes=1)
    server.withdraw(key)
    with pytest.raises(OSError, match="closed"):
        server.reap()
    server.reap()
    server.reap()
    assert handed == [[key], [key]]


@pytest.mark.parametrize("outcome", ["reads on", "released", "never granted"])
def test_memory_outlives_its_server_while_a_lease_may_be_read(outcome):
    """A reader that was frozen in a read reads on in a process that lives, whatever is there."""
    memory = torch.zeros(1)
    freed = threading.Event()
    weakref.finalize(memory, freed.set)
    lease_s = 0.5 if outcome == "reads on" else 600.0
    server = LeaseServer(lambda _: None, max_lease_total=10, lease_s=lease_s)
    epoch = server.offer("r", tokens=1, nbytes=1).epoch
    granted = lease_clock()
    if outcome != "never granted":
        server.handle(Claim(seq=1, request="r"), "D", lambda _: True)
    if outcome == "released":
        server.handle(Release(seq=2, request="r", epoch=epoch), "D", lambda _: True)
    server.close(memory)
    del memory
    assert freed.wait(60)
    assert (lease_clock() >= granted + lease_s) == (outcome == "reads on")


def test_a_timer_goes_on_after_an_error(caplog, monkeypatch):
    monkeypatch.setattr("kvconnect.transfer.leases.timer._AFTER_ERROR_S", 0.01)
    calls: list[int] = []

    def work():
        calls.append(1)
        raise ZeroDivisionError("a bug")

    with closing(Timer("kvconnect-test", work)):
        until(lambda: len(calls) >= 3)
    assert "a bug" in caplog.text
    done = len(calls)
    until(lambda: len(calls) == done)


@pytest.mark.parametrize("asks", ["renew", "release"])
@pytest.mark.parametrize(
    ("restarts", "why"), [(False, "has expired"), (True, "knows no such lease")]
)
def test_what_the_peer_no_longer_holds_is_invalid(restarts, why, asks, clock):
    """It was frozen until the lease had ended, or starts anew."""
    said, answers = [], []
    client = LeaseClient(clock=clock)
    client.connected("P", lambda message: said.append(message) or True)

    def answered_by(server):
        for message in said:
            server.handle(message, "D", answers.append)
        for message in answers:
            client.handle(message, "P")
        said.clear()
        answers.clear()

    servers = [LeaseServer(len, max_lease_total=10, lease_s=9, clock=clock) for _ in "12"]
    for server in servers:
        server.offer("r", tokens=1, nbytes=1)
    claimed = client.claim("P", "r")
    answered_by(servers[0])
    assert claimed.lease.may_read()
    if asks == "renew":
        clock.now += 4
        client.renew()
    clock.now += 10
    if asks == "release":
        assert client.release(claimed) is Outcome.OPEN
    answered_by(servers[restarts])
    assert claimed.lease.outcome is Outcome.INVALID
    assert why in claimed.lease.lost


def test_renewals_of_one_peer_go_in_one_message(monkeypatch, clock):
    monkeypatch.setattr("kvconnect.transfer.claims.MAX_ENTRIES", 10)
    said: list = []
    client = LeaseClient(clock=clock)
    client.connected("P", lambda message: said.append(message) or True)
    for number in range(15):
        claimed = client.claim("P", str(number))
        grant = client_grant(said[-1])
        client.handle(grant, "P")
        assert claimed.lease.may_read()
        if number == 9:
            clock.now += 1  # the later ones go along nevertheless
    said.clear()
    assert client.renew() == 50 + 3
    clock.now = 50 + 3
    client.renew()
    assert [len(one.leases) for one in said] == [10, 5]
    assert client.renew() == clock.now + 3


def client_grant(claim: Claim) -> Grant:
    return Grant(
        seq=claim.seq,
        request=claim.request,
        epoch=7,
        lease_s=9.0,
        tokens=1,
        blocks=(),
        watermark={"layers": 0, "tokens": 0},
    )


def test_a_request_is_claimed_once_at_a_time():
    client = LeaseClient()
    claimed = client.claim("P", "r")
    with pytest.raises(DuplicateRequest, match="'r' of peer 'P'"):
        client.claim("P", "r")
    client.abort(claimed)
    client.claim("P", "r")


def test_a_peer_that_is_disconnected_wakes_who_waits_for_it():
    """Its answers will not come by that way: a reader need not wait for its deadline."""
    client, heard = LeaseClient(), []
    claims = [client.claim(peer, "r") for peer in ("P", "Q")]
    for claimed in claims:
        claimed.listener = partial(heard.append, claimed.peer)
    client.disconnected("P", lambda _: True, "it went")
    assert heard == ["P"]
    assert [one.failed for one in claims] == [True, False]
    assert claims[0].reason.endswith("it went")


def test_progress_of_another_epoch_is_not_that_of_a_claim():
    """Its blocks have other content: the request was computed anew."""
    client = LeaseClient()
    claimed = client.claim("p", "r")
    seq, mark = next(iter(claimed.lease._sent)), Watermark(tokens=4, layers=1)
    grant = Grant(
        seq=seq, request="r", epoch=1, lease_s=60.0, tokens=9, blocks=((1,),), watermark=mark
    )
    client.handle(grant, "p")
    more = Watermark(tokens=9, layers=1)
    for epoch, blocks in ((2, ((1,),)), (1, ((1, 7),))):
        message = WatermarkOf(request="r", epoch=epoch, watermark=more, first=(1,), blocks=((7,),))
        client.handle(message, "p")
        assert (claimed.blocks, claimed.mark == more) == (blocks, epoch == 1)
