"""How a channel opens, or is refused: secrets, versions, what must be equal, garbage."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from endpoints import COMPAT, QUICK, SHORT, NoThread, Side, opened, until

from kvconnect.errors import BadMessage, ConfigurationError, PeerRefused
from kvconnect.trace import metrics
from kvconnect.transfer import acceptor
from kvconnect.transfer.control import handshake
from kvconnect.transfer.control.description import Compat
from kvconnect.transfer.control.endpoint import Disconnected
from kvconnect.transfer.control.handshake import OPENING_LIMIT, shake_hands
from kvconnect.transfer.control.keyed import GrantKeys
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.messages import (
    Claim,
    Error,
    Grant,
    Ping,
    Proof,
    Renewed,
    RenewedLease,
    Unknown,
    Watermark,
    decode,
    encode,
)
from kvconnect.transfer.control.peer import Peer
from kvconnect.transfer.control.wire import Wire, WireClosed, WireTimeout, frame
from kvconnect.transfer.seal import Seal
from kvconnect.transfer.secret import SharedSecret

WORDS = "correct horse battery staple"
SECRET = SharedSecret(WORDS)
LEASE = {"request": "r", "epoch": 1, "lease_s": 1.0}
MARK = Watermark(layers=0, tokens=0, before=0)
GRANT = Grant(seq=1, tokens=0, blocks=(), watermark=MARK, **LEASE)
GRANT_KEYS = GrantKeys(seq=1, region=0, unit=1, sizes=(), units=(), **LEASE)
RENEWED = Renewed(seq=1, leases=(RenewedLease(watermark=MARK, **LEASE),))


@pytest.fixture
def sides():
    """A listener and peers of it, closed at the end."""
    opened: list = []

    def start(p: Side, *ds: Side):
        opened.append(Listener(p.endpoint))
        peers = [Peer(d.endpoint, "127.0.0.1", opened[0].port) for d in ds]
        opened.extend(peers)
        return opened[0], *peers

    yield start
    for one in reversed(opened):
        one.close()


def wire_to(port: int) -> Wire:
    return Wire(socket.create_connection(("127.0.0.1", port)), limit=OPENING_LIMIT, silence_s=60)


def soon() -> float:
    return time.monotonic() + 60


def read_all(wire: Wire) -> None:
    while True:
        wire.read(soon())


def opening(*, secret: bool = False, version: int | None = None) -> bytes:
    version = handshake.PROTOCOL if version is None else version
    return handshake._OPENING.pack(handshake._MAGIC, version, secret, bytes(32))


def seal(wire: Wire, ours: bytes, theirs: bytes, *, initiator: bool) -> None:
    """Both openings were exchanged, no proof yet."""
    openings = (ours, theirs) if initiator else (theirs, ours)
    roles = (handshake._INITIATOR, handshake._ACCEPTOR)
    mine, other = roles if initiator else roles[::-1]
    wire.seal(Seal(None, mine, *openings), Seal(None, other, *openings))


# ------------------------------------------------------------------------------ accepted


@pytest.mark.parametrize("secret", [None, SECRET])
def test_both_sides_say_hello(sides, secret):
    p, d = Side("P", secret=secret), Side("D", secret=secret)
    _, peer = sides(p, d)
    assert d.connected() == p.hello
    assert p.connected() == d.hello
    assert opened(peer)
    assert peer.channel.send(Claim(seq=1, request="r"))
    assert p.next() == Claim(seq=1, request="r")


def test_hello_is_asked_for_at_each_connection(sides):
    p, d = Side("P"), Side("D")
    _, peer = sides(p, d)
    p.connected()
    d.connected()  # else there is no channel yet that `reconnect` would close
    d.hello = d.hello.model_copy(update={"local": b"of a transport that was rebuilt"})
    peer.reconnect()
    p.disconnected()
    assert p.connected().local == b"of a transport that was rebuilt"


# ------------------------------------------------------------------------------ refused


def other_than(value):
    return value + 1 if isinstance(value, int) else "other"


@pytest.mark.parametrize("name", sorted(Compat.model_fields))
def test_the_field_that_differs_is_named_on_both_sides(sides, caplog, name):
    value = getattr(COMPAT, name)
    other = other_than(value)
    caplog.set_level(logging.WARNING)
    _, peer = sides(Side("P", secret=SECRET), Side("D", secret=SECRET, **{name: other}))
    assert not opened(peer)
    assert isinstance(peer.error, PeerRefused)
    assert peer.error.field == name
    assert repr(other) in str(peer.error)
    assert repr(value) in str(peer.error)
    until(lambda: f"a peer was refused: {name}: " in caplog.text)


@pytest.mark.parametrize("name", sorted(Compat.model_fields.keys() - {"block_format", "transport"}))
def test_one_that_has_proved_nothing_is_told_neither_field_nor_values(sides, caplog, name):
    """The side that refuses has both in its log."""
    value = "of a secret model" if name == "model" else 7_654_321
    value = value if isinstance(getattr(COMPAT, name), int) else str(value)
    p = Side("P", **{name: value})
    caplog.set_level(logging.WARNING)
    _, peer = sides(p, Side("D"))
    assert not opened(peer)
    assert isinstance(peer.error, PeerRefused)
    assert peer.error.field == "compat"
    assert "another model or another cache" in str(peer.error)
    assert f"{name}:" not in str(peer.error)
    assert str(value) not in str(peer.error)
    until(lambda: f"a peer was refused: {name}: {value!r} here" in caplog.text)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (SECRET, SharedSecret(WORDS[::-1]), "another one"),
        (SECRET, None, "is set here"),
        (None, SECRET, "is set at the peer"),
    ],
)
def test_a_wrong_secret_is_refused_and_not_told(sides, caplog, ours, theirs, said):
    caplog.set_level(logging.DEBUG)
    p, d = Side("P", secret=theirs), Side("D", secret=ours)
    _, peer = sides(p, d)
    assert not opened(peer)
    assert isinstance(peer.error, PeerRefused)
    assert peer.error.field == "secret"
    assert p.events.empty()
    assert d.events.empty()
    text = f"{caplog.text} {peer!r} {peer.error!r} {p.endpoint!r} {d.endpoint!r}"
    assert said.split()[0] in text
    assert WORDS not in text
    assert WORDS[::-1] not in text


def test_another_version_is_refused_by_name(sides, monkeypatch):
    (listening,) = sides(Side("P"))
    monkeypatch.setattr(handshake, "PROTOCOL", 7)
    wire = wire_to(listening.port)
    wire.write(frame(opening(version=6)), soon())
    wire.read(soon())  # its own version, so that the other side can say so, too
    said = decode(wire.read(soon()))
    assert isinstance(said, Error)
    assert said.field == "protocol"
    assert said.message == "7 here, 6 at the peer"
    wire.close()


def test_a_proof_is_of_no_use_a_second_time(sides):
    """Neither sent again by an eavesdropper, nor sent back to the one who made it."""
    p = Side("P", secret=SECRET)
    (listening,) = sides(p)
    first = wire_to(listening.port)
    ours = opening(secret=True)
    first.write(frame(ours), soon())
    greeting = first.read(soon())
    seal(first, ours, greeting, initiator=True)
    proof = Proof(mac=SECRET.mac(handshake._INITIATOR, ours, greeting))
    first.write(first.frame(encode(proof)), soon())
    theirs = decode(first.read(soon()))
    assert isinstance(theirs, Proof)  # it was good
    for each in (proof, theirs):
        second = wire_to(listening.port)
        second.write(frame(ours), soon())
        seal(second, ours, second.read(soon()), initiator=True)
        second.write(second.frame(encode(each)), soon())
        said = decode(second.read(soon()))
        assert isinstance(said, Error)
        assert said.field == "secret"
        second.close()
    first.close()
    assert p.events.empty()


def test_one_that_has_no_secret_learns_nothing_but_that(sides):
    (listening,) = sides(Side("P", secret=SECRET))
    wire = wire_to(listening.port)
    ours = opening(secret=True)
    wire.write(frame(ours), soon())
    seal(wire, ours, wire.read(soon()), initiator=True)
    wire.write(wire.frame(encode(Side("X").hello)), soon())
    with pytest.raises(WireClosed):  # not even an error: it is no proof
        wire.read(soon())
    wire.close()


def test_an_initiator_wants_a_proof_too():
    """One who took the listener's place, and says that all is well."""
    side = Side("D", secret=SECRET)
    here, there = socket.socketpair()

    def pretend():
        wire = Wire(there, limit=OPENING_LIMIT, silence_s=60)
        ours = opening(secret=True)
        theirs = wire.read(soon())
        wire.write(frame(ours), soon())
        seal(wire, ours, theirs, initiator=False)
        wire.read(soon())
        wire.write(wire.frame(encode(Proof(mac=bytes(32)))), soon())
        wire.close()

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(PeerRefused, match="secret"):
        shake_hands(Wire(here, limit=OPENING_LIMIT, silence_s=60), side.endpoint, initiator=True)
    thread.join()
    here.close()


def test_a_message_before_the_opening_is_over_is_refused():
    side = Side("D")
    here, there = socket.socketpair()
    wire = Wire(there, limit=OPENING_LIMIT, silence_s=60)

    def pretend():
        ours = opening()
        wire.write(frame(ours), soon())
        seal(wire, ours, wire.read(soon()), initiator=True)
        wire.write(wire.frame(encode(Ping(number=1))), soon())

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(BadMessage, match="Ping where Hello is due"):
        shake_hands(Wire(here, limit=OPENING_LIMIT, silence_s=60), side.endpoint, initiator=False)
    thread.join()
    wire.close()
    here.close()


# ------------------------------------------------------------------------------ secrets


@pytest.mark.parametrize("secret", ["", "short", " " * 40, b"fifteen bytes.."])
def test_a_short_secret_is_refused_without_saying_it(secret):
    with pytest.raises(ConfigurationError, match=r"secret: \d+ bytes are too few") as refused:
        SharedSecret(secret)
    assert not secret.strip() or str(secret) not in str(refused.value)


def test_a_secret_is_never_shown():
    assert WORDS not in f"{SECRET!r} {SECRET} {vars(Side('P', secret=SECRET))}"
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="not pickled"):
            copied(SECRET)


def test_the_parts_of_a_mac_cannot_be_shifted():
    assert SECRET.mac(b"ab", b"c") != SECRET.mac(b"a", b"bc")
    assert SECRET.verifies(SECRET.mac(b"ab"), b"ab")
    assert not SECRET.verifies(b"", b"ab")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.com", ""])
def test_beyond_loopback_there_must_be_a_secret(host):
    for start in (Listener, lambda endpoint, host: Peer(endpoint, host, 1)):
        with pytest.raises(ConfigurationError, match=f"host: '{host}' is not a loopback.*secret"):
            start(Side("P").endpoint, host)


def test_beyond_loopback_it_works_with_one():
    p, d = Side("P", secret=SECRET), Side("D", secret=SECRET)
    with (
        Listener(p.endpoint, "0.0.0.0") as listening,
        Peer(d.endpoint, "127.0.0.1", listening.port) as peer,
    ):
        assert opened(peer)


# ------------------------------------------------------------------------------ the port


def test_a_port_that_is_taken_is_named():
    with Listener(Side("P").endpoint) as first:
        message = rf"port: 127.0.0.1:{first.port} is taken"
        with pytest.raises(ConfigurationError, match=message):
            Listener(Side("P").endpoint, port=first.port)
    with Listener(Side("P").endpoint, port=first.port):  # at once, as after a restart
        pass


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_named(port):
    with pytest.raises(ConfigurationError, match=f"port: {port} must be"):
        Listener(Side("P").endpoint, port=port)


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ConfigurationError, match=r"host: cannot listen at 192.0.2.1:0"):
        Listener(Side("P", secret=SECRET).endpoint, "192.0.2.1")


def garbage() -> list[bytes]:
    rng = random.Random(5)
    opened = frame(opening())
    return [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0\0\0\0",
        b"\xff" * 100,
        struct.pack(">I", OPENING_LIMIT) + rng.randbytes(OPENING_LIMIT),
        opened + frame(b""),
        opened + frame(rng.randbytes(1000)),
        opened + b"\xff\xff\xff\xff",
        opened + frame(encode(Side("X").hello)) + frame(rng.randbytes(50)),
        opened + frame(encode(Side("X").hello)) + b"\xff\xff\xff\xff",
        *(rng.randbytes(rng.randrange(1, 300)) for _ in range(20)),
    ]


def test_garbage_harms_nobody(sides):
    p, d = Side("P"), Side("D")
    listening, peer = sides(p, d)
    assert opened(peer)
    for data in garbage():
        with socket.create_connection(("127.0.0.1", listening.port)) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(60)
            while True:  # until it is closed: in time, or recv raises
                try:
                    if not sock.recv(65536):
                        break
                except ConnectionResetError:
                    break
    assert peer.channel is not None
    peer.channel.send(Claim(seq=1, request="r"))
    until(lambda: any(isinstance(one, Claim) for one in list(p.events.queue)))
    until(lambda: len(listening.channels()) == 1)


def test_half_open_connections_are_bounded_and_keep_nobody_out(sides, monkeypatch):
    monkeypatch.setattr(acceptor, "_MAX_OPENING", 4)
    (listening,) = sides(Side("P", timing=SHORT))
    pushed = metrics.snapshot().get("transfer.control.pushed_out", 0)
    silent = [socket.create_connection(("127.0.0.1", listening.port)) for _ in range(20)]
    until(lambda: metrics.snapshot().get("transfer.control.pushed_out", 0) - pushed >= 16)
    assert len(listening._opening) <= 4
    d = Side("D")
    with Peer(d.endpoint, "127.0.0.1", listening.port) as peer:
        assert opened(peer)
    until(lambda: not listening._opening)  # those that say nothing go, too
    until(lambda: not listening._threads)
    for sock in silent:
        sock.settimeout(60)
        assert sock.recv(1) == b""
        sock.close()


def test_one_for_which_there_is_no_thread_is_closed_and_those_after_it_are_served(
    sides, monkeypatch
):
    p, d = Side("P"), Side("D")
    (listening,) = sides(p)
    with monkeypatch.context() as patch:
        patch.setattr(acceptor, "threading", SimpleNamespace(Thread=NoThread))
        with socket.create_connection(("127.0.0.1", listening.port)) as sock:
            sock.settimeout(60)
            assert sock.recv(1) == b""
    assert not listening._opening
    with Peer(d.endpoint, "127.0.0.1", listening.port) as peer:
        assert opened(peer)


def test_one_that_sends_a_byte_now_and_then_is_cut_off(sides):
    (listening,) = sides(Side("P", timing=SHORT))
    with socket.create_connection(("127.0.0.1", listening.port)) as sock:
        sock.settimeout(0.05)
        for byte in frame(opening()):
            try:
                sock.sendall(bytes([byte]))
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("it was heard out")


def test_channels_are_bounded_and_the_oldest_that_was_granted_nothing_goes(monkeypatch):
    monkeypatch.setattr(acceptor, "_MAX_ADMITTED", 2)
    p = Side("P")
    with (
        Listener(p.endpoint) as listening,
        Peer(Side("reader").endpoint, "127.0.0.1", listening.port) as reader,
    ):
        assert opened(reader)
        until(lambda: p.channels)
        kept = p.channels[0]
        assert kept.send(GRANT)
        wires = [wire_to(listening.port) for _ in range(3)]
        for number, wire in enumerate(wires):
            shake_hands(wire, Side(f"idle {number}").endpoint, initiator=True)
            until(lambda number=number: len(p.channels) == number + 2)
            assert listening.channels() == [kept, p.channels[-1]]
        for wire in wires[:2]:
            with pytest.raises(WireClosed):
                read_all(wire)
        for wire in wires:
            wire.close()


@pytest.mark.parametrize(
    ("answer", "is_of_use"),
    [
        (GRANT, True),
        (GRANT_KEYS, True),
        (RENEWED, True),
        (Renewed(seq=1), False),
        (Unknown(seq=1, request="r"), False),
    ],
    ids=["lease", "blocks", "renewal", "of nothing", "nothing"],
)
def test_a_channel_is_of_use_once_it_was_granted_something(sides, answer, is_of_use):
    p = Side("P")
    _, peer = sides(p, Side("D"))
    assert opened(peer)
    until(lambda: p.channels)
    assert p.channels[0].used_at is None
    assert p.channels[0].send(answer)
    assert (p.channels[0].used_at is not None) is is_of_use


def test_one_that_connects_anew_all_the_time_leaves_no_thread_behind(sides):
    (listening,) = sides(Side("P"))
    wires = [wire_to(listening.port) for _ in range(20)]
    for wire in wires:
        shake_hands(wire, Side("D").endpoint, initiator=True)
    # The peer neither reads nor closes: what took its place has cut it off.
    until(lambda: len(listening._threads) <= 1, QUICK.silence_s / 2)
    for wire in wires:
        wire.close()


def test_a_peer_that_connects_anew_takes_the_place_of_its_earlier_channel():
    p = Side("P")
    with Listener(p.endpoint) as listening:
        before, after = Side("D"), Side("D")
        with Peer(before.endpoint, "127.0.0.1", listening.port) as first:
            assert opened(first)
            p.connected()
            with Peer(after.endpoint, "127.0.0.1", listening.port):
                before.connected()
                before.disconnected()
                events = iter(p.next, None)
                ends = (event.reason for event in events if isinstance(event, Disconnected))
                assert "connected anew" in next(ends)
                first.close()
                until(lambda: len(listening.channels()) == 1)


def test_a_peer_that_does_not_answer_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        d = Side("D", timing=SHORT)
        with Peer(d.endpoint, "127.0.0.1", silent.getsockname()[1]) as peer:
            until(lambda: peer.error is not None)
            assert isinstance(peer.error, WireTimeout)
            until(lambda: peer.attempts > 1)


def test_what_is_not_a_peer_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            sock, _ = server.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with Peer(Side("D").endpoint, "127.0.0.1", server.getsockname()[1]) as peer:
            until(lambda: peer.error is not None)
            assert isinstance(peer.error, BadMessage)
        thread.join()


def test_a_process_without_the_extra_says_what_to_install():
    source = "import sys; sys.modules['msgpack'] = None\nimport kvconnect.transfer.control.messages"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, env=os.environ
    )
    assert "pip install '.[transfer]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("10.0.0.1", None, "10.0.0.1:7"),
        ("::1", None, "[::1]:7"),
        ("0.0.0.0", "host:0", "host:7"),
        ("0.0.0.0", "host:9", "host:9"),
    ],
)
def test_an_address_is_told_as_others_reach_it(host, advertise, address):
    listening = SimpleNamespace(host=host, port=7)
    assert Listener.address(listening, advertise) == address
