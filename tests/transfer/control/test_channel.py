"""An open channel: order, bounds, heartbeat, and how it ends when the peer does."""

from __future__ import annotations

import gc
import random
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from endpoints import QUICK, SHORT, ListeningProcess, NoThread, Side, opened, until
from hypothesis import given
from hypothesis import strategies as st
from own_process import own_process

from kvconnect.testing.processes.usage import descriptors
from kvconnect.transfer.control import channel as channel_module
from kvconnect.transfer.control.channel import Channel, SendQueue
from kvconnect.transfer.control.endpoint import Timing
from kvconnect.transfer.control.handshake import OPENING_LIMIT, shake_hands
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.messages import (
    Claim,
    Hello,
    Ping,
    Unknown,
    Watermark,
    WatermarkOf,
    decode,
    encode,
)
from kvconnect.transfer.control.peer import Peer
from kvconnect.transfer.control.wire import Wire, WireTimeout, frame
from kvconnect.transfer.secret import SharedSecret


@pytest.fixture
def process() -> Iterator[ListeningProcess]:
    child = ListeningProcess()
    yield child
    child.end()


@contextmanager
def connected(timing: Timing = QUICK) -> Iterator[tuple[Side, Side, Peer]]:
    p, d = Side("P", timing=timing), Side("D", timing=timing)
    with Listener(p.endpoint) as listening, Peer(d.endpoint, "127.0.0.1", listening.port) as peer:
        p.connected()
        d.connected()
        yield p, d, peer


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side, Peer]]:
    with connected() as pair:
        yield pair


def mark(number: int) -> WatermarkOf:
    return WatermarkOf(request="r", epoch=1, watermark=Watermark(layers=0, tokens=number))


def test_messages_arrive_in_order_from_several_threads(pair):
    p, _, peer = pair
    threads = [
        threading.Thread(target=lambda name=name: [
            peer.channel.send(Claim(seq=n, request=str(name))) for n in range(300)
        ])
        for name in range(4)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    seen: dict[str, list[int]] = {}
    for _ in range(1200):
        claim = p.next()
        seen.setdefault(claim.request, []).append(claim.seq)
    assert seen == {str(name): list(range(300)) for name in range(4)}
    for thread in threads:
        thread.join()


@given(st.lists(st.one_of(st.integers(1, 20), st.just("take")), max_size=30), st.data())
def test_what_is_sent_at_once_overtakes_nothing(steps, data):
    """Frames of so many bytes; the kernel takes a part of each, the writer the rest."""
    queue, arrived, sent = SendQueue(1000, 100, bytes), bytearray(), bytearray()
    taken = b""

    def write(piece):
        assert not taken
        count = data.draw(st.integers(0, len(piece)))
        arrived.extend(piece[:count])
        return count

    for step in steps:
        if step == "take":
            arrived += taken
            taken = queue.take(0) or b""
        else:
            piece = random.Random(len(sent)).randbytes(step)
            sent += piece
            assert queue.send(piece, write)
    arrived += taken
    assert arrived + (queue.take(0) or b"") == sent


def test_what_was_said_before_closing_arrives_although_the_peer_talks_on(pair):
    """A connection closed with something unread takes from the peer what it had not read."""
    p, _, peer = pair
    (channel,) = p.channels
    large = mark(0).model_copy(update={"first": (0,), "blocks": (tuple(range(100_000)),)})
    for number in range(1000):
        if number % 100 == 0:
            channel.send(large)
        peer.channel.send(mark(number))
    peer.close()
    assert [p.next().watermark.tokens for _ in range(1000)] == list(range(1000))
    assert p.disconnected() == "the peer closed: closed here"
    assert peer.channel is None


@pytest.mark.slow
@own_process
def test_an_idle_channel_stays_open_and_costs_next_to_nothing():
    with connected(SHORT) as (_, d, peer):
        channel = peer.channel
        before = time.process_time()
        threading.Event().wait(2 * SHORT.silence_s)
        used = time.process_time() - before
        assert peer.channel is channel
        assert d.events.empty()
        # Both sides, five times the default's heartbeats; one thread that spins uses 2 s.
        assert used < 0.5, f"{used:.3f} s of {2 * SHORT.silence_s} s"


def test_a_peer_that_does_not_take_what_is_sent_loses_its_channel(pair, monkeypatch):
    """Memory is bounded, and no message in between is skipped."""
    _, d, peer = pair
    channel = peer.channel
    monkeypatch.setattr(channel._queue, "_max_frames", 10)
    monkeypatch.setattr(channel._wire, "write_now", lambda data: 0)  # nor does the kernel
    with channel._queue._changed:  # the writer cannot take any
        sent = [channel.send(mark(number)) for number in range(12)]
    assert sent.index(False) <= 10
    assert not any(sent[sent.index(False) :])
    assert "does not take" in d.disconnected()


@pytest.mark.parametrize("wrong", [b"\xc1", encode(Ping(number=1)) + b"x", None])
def test_one_that_breaks_the_protocol_is_cut_off(pair, wrong):
    p, d, peer = pair
    data = encode(d.hello) if wrong is None else wrong
    peer.channel._queue.put(frame(data))
    assert "broke the protocol" in p.disconnected()
    d.disconnected()
    d.connected()  # and it connects again


def test_what_its_owner_raises_closes_the_channel(caplog):
    p = Side("P")

    def deliver(channel, event):
        p._take(channel, event)
        if isinstance(event, Claim):
            raise ZeroDivisionError("a bug")

    owner = Side("P", deliver=deliver)
    d = Side("D")
    with (
        Listener(owner.endpoint) as listening,
        Peer(d.endpoint, "127.0.0.1", listening.port) as peer,
    ):
        d.connected()
        peer.channel.send(Claim(seq=1, request="r"))
        p.connected()
        p.next()
        assert "Claim was not taken: a bug" in p.disconnected()
        d.disconnected()
        d.connected()
    assert "ZeroDivisionError" in caplog.text


# ------------------------------------------------------------------------------ the peer's end


def test_a_killed_peer_is_noticed_at_once_and_its_successor_found(process):
    d = Side("D")
    with Peer(d.endpoint, "127.0.0.1", process.port) as peer:
        first = d.connected()
        peer.channel.send(Claim(seq=1, request="r"))
        assert d.next() == Unknown(seq=1, request="r")
        process.signal(signal.SIGKILL)
        d.disconnected(30)
        assert peer.channel is None
        successor = ListeningProcess(process.port)
        try:
            again = d.connected()
            assert again.engine_id == first.engine_id
            assert again.boot != first.boot
        finally:
            successor.end()


def test_a_peer_is_noticed_if_it_freezes_and_not_if_its_step_takes_long(process):
    """And found again when it wakes; and it takes leave when it ends."""
    d = Side("D", timing=SHORT)
    with Peer(d.endpoint, "127.0.0.1", process.port):
        d.connected()
        process.ask("compute", 1.5 * SHORT.silence_s)
        assert d.events.empty()
        process.freeze()
        assert "no sign of life" in d.disconnected(30)
        process.wake()
        d.connected()
        process.ask("close")
        assert "the peer is shutting down" in d.disconnected()


def test_the_side_that_listens_notices_silence_too():
    p = Side("P", timing=SHORT)
    with (
        Listener(p.endpoint) as listening,
        socket.create_connection(("127.0.0.1", listening.port)) as silent,
    ):
        wire = Wire(silent, limit=OPENING_LIMIT, silence_s=60)
        shake_hands(wire, Side("D").endpoint, initiator=True)
        p.connected()
        assert "no sign of life" in p.disconnected(30)


def test_what_is_late_by_its_own_fault_waits_as_long_again(monkeypatch):
    """And no longer."""
    ours, theirs = socket.socketpair()
    wire = Wire(ours, limit=100, silence_s=1)
    poll, stood_still = select.poll, []

    class Late:
        def __init__(self):
            self._poll = poll()
            self.register = self._poll.register

        def poll(self, ms):
            found = self._poll.poll(ms)
            if not stood_still:
                stood_still.append(True)
                time.sleep(0.2)  # what is planted
            return found

    monkeypatch.setattr(select, "poll", Late)
    began = time.monotonic()
    with pytest.raises(WireTimeout):
        wire.read(began + 0.1)
    assert time.monotonic() >= began + 0.3
    wire.close()
    theirs.close()


def test_the_usual_timing_is_within_three_seconds():
    usual = Timing()
    assert usual.silence_s + usual.heartbeat_s <= 3


@pytest.mark.slow
def test_with_the_usual_timing_a_frozen_peer_is_noticed_within_three_seconds():
    child = ListeningProcess(timing=Timing())
    d = Side("D", timing=Timing())
    try:
        with Peer(d.endpoint, "127.0.0.1", child.port):
            d.connected()
            child.freeze()
            d.disconnected(30)
    finally:
        child.end()


def test_attempts_become_rarer_and_never_stop():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    d = Side("D")
    with Peer(d.endpoint, "127.0.0.1", port) as peer:
        until(lambda: peer.attempts >= 6)
        began, attempts = time.monotonic(), peer.attempts
        until(lambda: time.monotonic() - began > 0.5 and peer.attempts > attempts)
        # Every 0.15 to 0.25 s now; a machine under load makes it fewer.
        made = peer.attempts - attempts
        assert made <= (time.monotonic() - began) / 0.15 + 1
        p = Side("P")
        with Listener(p.endpoint, port=port):
            d.connected()


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".org", "a\0b"])
def test_a_name_that_is_none_is_an_error_and_not_the_end_of_the_thread(host):
    side = Side("A", secret=SharedSecret("of at least 16 characters"))
    with Peer(side.endpoint, host, 80) as peer:
        until(lambda: peer.error is not None)
        assert peer._thread.is_alive()


@own_process
def test_no_thread_and_no_descriptor_is_left():
    gc.collect()
    before = descriptors()
    for _ in range(3):
        p, d = Side("P"), Side("D")
        with (
            Listener(p.endpoint) as listening,
            Peer(d.endpoint, "127.0.0.1", listening.port) as peer,
        ):
            assert opened(peer)
    assert threading.active_count() == 1
    assert descriptors() <= before


@own_process
def test_when_descriptors_are_short_it_goes_on_later():
    p, d = Side("P"), Side("D")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Listener(p.endpoint) as listening:
        other = socket.create_connection(("127.0.0.1", listening.port))
        used = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
        client = socket.socket()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
            client.connect(("127.0.0.1", listening.port))
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            client.close()
            other.close()
        with Peer(d.endpoint, "127.0.0.1", listening.port) as peer:
            assert opened(peer)


def test_a_channel_whose_thread_cannot_be_had_is_closed(monkeypatch):
    p, d = Side("P"), Side("D")
    with Listener(p.endpoint) as listening:
        none = SimpleNamespace(**vars(threading) | {"Thread": NoThread})
        monkeypatch.setattr(channel_module, "threading", none)
        with Peer(d.endpoint, "127.0.0.1", listening.port) as peer:
            until(lambda: isinstance(peer.error, RuntimeError))
            assert p.events.empty()
            assert d.events.empty()
            monkeypatch.undo()
            d.connected()


def test_a_channel_says_what_it_is():
    here, there = socket.socketpair()
    hello = Side("P").hello
    channel = Channel(Wire(here, limit=1, silence_s=1), Side("D").endpoint, hello)
    assert repr(channel) == "Channel('P', rank=0, open)"
    assert decode(encode(hello)) == hello
    assert isinstance(hello, Hello)
    assert hello.holder.startswith("P/0/")
    here.close()
    there.close()
