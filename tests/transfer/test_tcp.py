"""`TcpTransport`: who may connect, and what strangers can do."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_process import own_process
from peer_process import MiB, pattern
from waiting import until

from kvconnect.errors import ConfigurationError
from kvconnect.transfer import acceptor
from kvconnect.transfer.local import encode
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp import TcpTransport, handshake, source, stream
from kvconnect.transfer.tcp.peer import TcpLocal
from kvconnect.transfer.tcp.stream import receive_exactly
from kvconnect.transfer.transport import PeerUnreachable, Reads


@pytest.fixture
def server(transport_of):
    transport = transport_of("tcp", identity="server")
    transport.register(torch.from_numpy(pattern(1, MiB)))
    return transport


@pytest.fixture
def reader(transport_of):
    return transport_of("tcp", identity="reader")


def connection_to(transport):
    connection = socket.create_connection(("127.0.0.1", json.loads(transport.local())["port"]), 60)
    opened.append(connection)
    return connection


opened = []


@pytest.fixture(autouse=True)
def close_connections():
    yield
    while opened:
        opened.pop().close()


SECRET, OTHER = SharedSecret("hunter2 of sixteen"), SharedSecret("another of sixteen")


def introduce(transport, *, let_in=True):
    """A connection with a handshake made by hand, without a secret, and the codes of its ways."""
    connection = connection_to(transport)
    greeting = receive_exactly(connection, 36)
    incarnation = bytes.fromhex(json.loads(transport.local())["incarnation"])
    ours = secrets.token_bytes(32)
    signed = greeting[:4] + b"reader" + greeting[4:] + ours + incarnation
    connection.sendall(greeting[:4] + incarnation + ours + hmac.digest(b"", signed, hashlib.sha256))
    assert (receive_exactly(connection, 33)[0] == 0) is let_in
    return connection, handshake._seals(None, greeting[4:], ours)


def request(region, runs, *, magic=0x4B565453, total=None, count=None):
    """The parts of a request."""
    total = sum(nbytes for _, nbytes in runs) if total is None else total
    head = struct.pack("<IIIQQ", magic, region, len(runs) if count is None else count, total, 0)
    return head, b"".join(struct.pack("<qq", *run) for run in runs)


def send(connection, seals, parts):
    connection.sendall(b"".join(part + seals.requests.code(part) for part in parts))


def assert_serves(server, reader):
    memory = torch.zeros(64, dtype=torch.uint8)
    into = reader.register(memory)
    handle = reader.connect(server.local())
    reader.pull(handle, Reads(0, [64], into, [0], 64), deadline_s=60).done.result()
    assert np.array_equal(memory, pattern(1, 128)[64:])


def ended(connection):
    """Whether the other side closed it, within the socket's timeout."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@settings(max_examples=25)
@given(st.binary(min_size=84, max_size=300))
def test_random_bytes_on_the_port_do_no_harm(garbage):
    server, reader = TcpTransport(), TcpTransport()
    server.open()
    reader.open()
    server.register(torch.from_numpy(pattern(1, 256)))
    connection = connection_to(server)
    connection.sendall(garbage)
    assert ended(connection)
    assert_serves(server, reader)
    server.close()
    reader.close()


def test_a_reader_that_was_let_in_is_refused_what_is_outside(server, reader):
    connection, seals = introduce(server)
    for region, runs in (
        (1, [(0, 16)]),
        (0xFFFFFFFF, [(0, 16)]),
        (0, [(MiB - 8, 16)]),
        (0, [(-1, 16)]),
        (0, [(0, 16), (MiB, 1)]),
        (0, [((1 << 63) - 8, 16)]),
    ):
        send(connection, seals, request(region, runs))
        assert struct.unpack("<IIQII", receive_exactly(connection, 40)[:24])[1:] == (1, 0, 0, 0)
    send(connection, seals, request(0, [(16, 16), (0, 4)]))
    answer = receive_exactly(connection, 40 + 20 + 8)
    had = pattern(1, 32).tobytes()
    assert answer[40:-8] == had[16:] + had[:4]


@pytest.mark.parametrize(
    "malformed",
    [
        request(0, [(0, 16)], magic=7),
        request(0, [], total=0),
        request(0, [(0, 16)], count=1 << 31),
        request(0, [(0, 16)], total=15),
        request(0, [(0, -16)], total=16),
        request(0, [(0, (1 << 63) - 1)] * 3, total=(1 << 64) - 1),
        request(0, [(0, (1 << 62))] * 4, total=0),
    ],
    ids=["magic", "no runs", "too many runs", "sum", "negative", "huge", "overflow"],
)
def test_a_malformed_request_ends_its_connection_alone(server, reader, malformed):
    connection, seals = introduce(server)
    send(connection, seals, malformed)
    assert ended(connection)
    assert_serves(server, reader)


def test_one_that_is_pushed_out_while_it_proves_itself_reads_nothing(server, monkeypatch):
    reached, pushed = threading.Event(), threading.Event()
    answer = source.answer

    def late(*args):
        known = answer(*args)
        reached.set()
        assert pushed.wait(60)
        return known

    monkeypatch.setattr(source, "answer", late)
    connection, seals = introduce(server)
    assert reached.wait(60)
    monkeypatch.setattr(source, "answer", answer)
    more = [connection_to(server) for _ in range(32)]
    receive_exactly(more[-1], 36)
    pushed.set()
    with contextlib.suppress(ConnectionError):
        send(connection, seals, request(0, [(0, 16)]))
    assert ended(connection)
    assert not server._source._admitted


def test_idle_readers_keep_no_reader_out_nor_cost_one_its_connection(
    server, transport_of, monkeypatch
):
    reader = transport_of("tcp", identity="reader", connections=1)
    monkeypatch.setattr(acceptor, "_MAX_ADMITTED", 4)
    assert_serves(server, reader)
    (kept,) = server._source._admitted
    # Each is admitted after its handshake, on a thread of its own: in any order.
    idle = {introduce(server)[0] for _ in range(8)}
    while len(idle) > 3:
        closed, _, _ = select.select(idle, [], [], 60)
        assert closed
        idle.difference_update(closed)
    with server._source._lock:
        assert len(server._source._admitted) == 4
        assert kept in server._source._admitted
    assert_serves(server, reader)


def test_one_byte_at_a_time_does_not_prolong_the_handshake(monkeypatch, transport_of):
    monkeypatch.setattr(source, "_HANDSHAKE_S", 0.3)
    connection = connection_to(transport_of("tcp"))
    receive_exactly(connection, 36)
    connection.settimeout(0.01)
    bound = time.monotonic() + 60
    while True:
        assert time.monotonic() < bound
        try:
            connection.send(b"K")
            if not connection.recv(1):
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break


def test_a_reader_that_takes_nothing_is_disconnected(monkeypatch, transport_of, reader):
    monkeypatch.setattr(source, "_STALL_S", 0.2)
    server = transport_of("tcp")
    server.register(torch.from_numpy(pattern(1, 32 * MiB)))
    connection, seals = introduce(server)
    send(connection, seals, request(0, [(0, 32 * MiB)]))
    until(lambda: not server._source._admitted)
    server.register(torch.from_numpy(pattern(1, 256)))
    assert_serves(server, reader)


def test_a_reader_that_does_not_know_the_secret_is_sent_nothing(transport_of):
    """One that does not mind whether the source knows it."""
    server = transport_of("tcp", secret=SECRET)
    server.register(torch.from_numpy(pattern(1, 256)))
    connection, seals = introduce(server, let_in=False)
    with contextlib.suppress(ConnectionError):
        send(connection, seals, request(0, [(0, 256)]))
    assert ended(connection)


def test_a_source_that_says_nothing_is_given_up():
    incarnation = "0" * 32
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        contextlib.closing(TcpTransport(connect_timeout_s=0.2)) as reader,
    ):
        host, port = silent.getsockname()
        local = TcpLocal(identity="p", incarnation=incarnation, regions=(1,), host=host, port=port)
        reader.open()
        ended = threading.Event()

        def connect() -> None:
            with contextlib.suppress(PeerUnreachable):
                reader.connect(encode(local))
            ended.set()

        threading.Thread(target=connect).start()
        accepted, _ = silent.accept()
        with accepted:
            was_given_up = ended.wait(10)
        assert ended.wait(10)
        assert was_given_up


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, OTHER), (SECRET, None), (None, OTHER)])
def test_another_secret_is_refused(transport_of, ours, theirs):
    server = transport_of("tcp", secret=ours)
    reader = transport_of("tcp", secret=theirs)
    with pytest.raises(PeerUnreachable, match="secret") as refused:
        reader.connect(server.local())
    assert "hunter2" not in str(refused.value)


def test_the_same_secret_is_let_in(transport_of):
    server = transport_of("tcp", secret=SECRET)
    server.register(torch.from_numpy(pattern(1, 256)))
    reader = transport_of("tcp", secret=SharedSecret(" hunter2 of sixteen\n"))
    assert_serves(server, reader)
    assert b"hunter2" not in server.local()
    assert "hunter2" not in repr(vars(reader.connect(server.local())).keys()) + repr(server)


def test_a_source_that_does_not_know_the_secret_is_not_read_from(transport_of):
    """One that lets everybody in, and signs with nothing."""
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor():
        connection, _ = listener.accept()
        connection.sendall(handshake._MAGIC + bytes(32))
        connection.recv(84, socket.MSG_WAITALL)
        connection.sendall(bytes(33))
        connection.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    local = json.loads(transport_of("tcp").local())
    local["port"] = listener.getsockname()[1]
    with pytest.raises(PeerUnreachable, match="secret is another"):
        transport_of("tcp", secret=SECRET).connect(json.dumps(local).encode())
    thread.join()
    listener.close()


def test_another_version_is_refused_by_name(server, reader):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def former():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"KVT\x02" + bytes(32))
                connection.recv(1)

        thread = threading.Thread(target=former)
        thread.start()
        local = json.loads(server.local()) | {"port": listener.getsockname()[1]}
        with pytest.raises(PeerUnreachable, match=r"speaks version 2 .*this process version 4"):
            reader.connect(json.dumps(local).encode())
        thread.join()


def test_nothing_listens_beyond_loopback_without_a_secret():
    for host in ("0.0.0.0", "::", "", "10.1.2.3", "example.org"):
        with pytest.raises(ConfigurationError, match="secret"):
            TcpTransport(host=host)
    with pytest.raises(ConfigurationError, match="advertise"):
        TcpTransport(host="0.0.0.0", secret=SECRET)
    with pytest.raises(ConfigurationError, match="connections=0"):
        TcpTransport(connections=0)
    TcpTransport(host="::1")


@pytest.mark.parametrize(("ours", "stays"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_congestion_is_not_controlled_between_ends_of_one_address(ours, stays):
    def algorithm(sock):
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        usual = algorithm(listener)
        ends = socket.create_connection(listener.getsockname(), 60, (ours, 0)), listener.accept()[0]
        opened.extend(ends)
        for end in ends:
            stream.prepare(end)
            assert algorithm(end) == (b"reno" if stays else usual)


def test_every_address_is_listened_on_when_told_to(transport_of):
    server = transport_of("tcp", host="0.0.0.0", advertise="127.0.0.1", secret=SECRET)
    server.register(torch.from_numpy(pattern(1, 256)))
    assert_serves(server, transport_of("tcp", secret=SECRET))


def test_more_runs_than_one_request_may_have(server, reader, monkeypatch):
    monkeypatch.setattr("kvconnect.transfer.tcp.peer.MAX_RUNS", 7)
    memory = torch.zeros(MiB, dtype=torch.uint8)
    into = reader.register(memory)
    order = np.random.default_rng(1).permutation(64)
    reads = Reads(0, order * 16384, into, order[::-1] * 16384, 16384)
    reader.pull(reader.connect(server.local()), reads, deadline_s=60).done.result()
    had = pattern(1, MiB).reshape(64, -1)
    assert np.array_equal(memory.reshape(64, -1)[order[::-1].copy()], had[order])


def test_memory_of_a_device_goes_through_a_buffer(server, reader, monkeypatch):
    """The way of CUDA memory, here with memory of the host."""
    monkeypatch.setattr("kvconnect.transfer.tcp.stream.PIECE_NBYTES", 1000)
    memory = torch.zeros(MiB, dtype=torch.uint8)
    into = reader.register(memory)
    for transport in (server, reader):
        for region in transport._regions.all():
            object.__setattr__(region, "host", False)
    reads = Reads(0, np.array([0, 300_000]), into, np.array([200_000, 500_000]), 150_001)
    reader.pull(reader.connect(server.local()), reads, deadline_s=60).done.result()
    had = pattern(1, MiB)
    assert np.array_equal(memory[200_000:350_001], had[:150_001])
    assert np.array_equal(memory[500_000:650_001], had[300_000:450_001])
    assert not memory[:200_000].any()


def test_a_connection_that_the_source_dropped_is_made_anew(server, reader):
    memory = torch.zeros(64, dtype=torch.uint8)
    into = reader.register(memory)
    handle = reader.connect(server.local())
    for one in list(server._source._admitted):
        one.stream.connection.shutdown(socket.SHUT_RDWR)
    reader.pull(handle, Reads(0, [64], into, [0], 64), deadline_s=60).done.result()
    assert np.array_equal(memory, pattern(1, 128)[64:])


def test_a_rebuild_whose_port_is_taken_can_be_tried_again(server, reader, monkeypatch):
    port = json.loads(server.local())["port"]
    with monkeypatch.context() as patch:
        patch.setattr(source.Source, "__init__", lambda *_: (_ for _ in ()).throw(TAKEN))
        with pytest.raises(ConfigurationError, match="planted"):
            server.rebuild()
    server.rebuild()
    assert json.loads(server.local())["port"] == port
    assert_serves(server, reader)


def test_a_transport_that_is_closed_amid_a_rebuild_listens_no_more(server, monkeypatch):
    port = json.loads(server.local())["port"]
    reached, go_on, listen = threading.Event(), threading.Event(), source.Source.__init__

    def late(*args):
        reached.set()
        assert go_on.wait(60)
        return listen(*args)

    monkeypatch.setattr(source.Source, "__init__", late)
    rebuilding = threading.Thread(target=server.rebuild)
    closing = threading.Thread(target=server.close)
    rebuilding.start()
    assert reached.wait(60)
    closing.start()
    closing.join(0.05)
    go_on.set()
    rebuilding.join(60)
    closing.join(60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 60)


TAKEN = ConfigurationError("planted: the port is taken")


@own_process
def test_no_thread_is_left_after_close():
    server, reader = TcpTransport(), TcpTransport()
    server.open()
    reader.open()
    server.register(torch.from_numpy(pattern(1, MiB)))
    memory = torch.zeros(64, dtype=torch.uint8)
    reader.register(memory)
    handle = reader.connect(server.local())
    reader.disconnect(handle)
    reader.connect(server.local())
    reader.close()
    server.close()
    server.close()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(60)  # one that had closed its connection already is at its last line
            assert not thread.is_alive(), thread.name
