"""The proxy does to a connection what it says, and nothing else.

That each fault is one: test_every_check_can_fail.py, whose wrong stores it alone finds.
"""

from __future__ import annotations

import errno
import gc
import socket
import threading
import time
import warnings
from contextlib import closing, contextmanager, suppress

import pytest

from kvconnect.testing.faults.tcp_fault import TcpFault, longer, shorter
from kvconnect.testing.faults.tcp_proxy import TcpProxy


class EchoServer:
    """Sends back what it gets."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=[client], daemon=True).start()

    @staticmethod
    def serve(client):
        with closing(client):
            try:
                while data := client.recv(65536):
                    client.sendall(data)
            except OSError:
                pass


@pytest.fixture
def proxy():
    server = EchoServer()
    with closing(server.listener), TcpProxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy):
    opened = []

    def connect(timeout=60.0):
        opened.append(socket.create_connection((proxy.host, proxy.port), timeout))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


def receive(client, nbytes):
    data = bytearray()
    while len(data) < nbytes:
        more = client.recv(nbytes - len(data))
        if not more:
            break
        data += more
    return data


def echoes(client, data=b"x"):
    client.sendall(data)
    return receive(client, len(data)) == data


def is_silent(client):
    client.sendall(b"b")
    client.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(60)
    return True


def test_bytes_pass_unchanged_in_both_directions(connect):
    client = connect()
    message = bytes(range(256)) * 4096
    threading.Thread(target=client.sendall, args=[message], daemon=True).start()
    assert receive(client, len(message)) == message


def test_end_of_a_stream_is_passed_on(connect):
    client = connect()
    client.sendall(b"last")
    client.shutdown(socket.SHUT_WR)
    assert receive(client, 100) == b"last"


def test_frozen_connections_go_on_afterwards(proxy, connect):
    old = connect()
    assert echoes(old)
    proxy.set(TcpFault(frozen=True))
    new = connect()
    assert is_silent(old)
    assert is_silent(new)
    proxy.heal()
    assert receive(old, 1) == receive(new, 1) == b"b"


def test_half_open_connections_are_silent_and_then_reset(proxy, connect):
    client = connect()
    assert echoes(client)
    proxy.set(TcpFault(half_open=True))
    assert is_silent(client)
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


@pytest.mark.parametrize("at", [1, 65536, 100_000])
def test_reset_after_exactly_so_many_bytes(proxy, connect, at):
    proxy.set(TcpFault(reset_after=at))
    client = connect()
    threading.Thread(target=client.sendall, args=[b"z" * at], daemon=True).start()
    assert len(receive(client, at)) == at
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_throttled_answers_are_slow_and_whole(proxy, connect):
    proxy.set(TcpFault(bytes_per_s=100))
    start = time.monotonic()
    assert echoes(connect(), b"0123456789")
    assert time.monotonic() - start > 0.04


def test_throttle_ends_when_healed(proxy, connect):
    proxy.set(TcpFault(bytes_per_s=1))
    client = connect()
    client.sendall(b"x" * 1000)
    assert receive(client, 1) == b"x"
    proxy.heal()
    assert len(receive(client, 999)) == 999


def test_delay_is_added_to_each_answer_and_is_no_low_speed(proxy, connect):
    proxy.set(TcpFault(delay_s=0.2))
    client = connect()
    message = bytes(32 << 20)
    start = time.monotonic()
    threading.Thread(target=client.sendall, args=[message], daemon=True).start()
    assert receive(client, 1) == b"\0"
    assert time.monotonic() - start >= 0.2
    assert len(receive(client, len(message) - 1)) == len(message) - 1
    assert time.monotonic() - start < 60  # 64 KiB each 0.2 s take 100


@pytest.mark.parametrize(
    ("rewrite", "expected"),
    [
        (shorter(3, 2), b"01256789"),
        (longer(3, 2), b"012\0\x003456789"),
        (shorter(8, 9), b"01234567"),
    ],
)
def test_answers_of_another_length(proxy, connect, rewrite, expected):
    proxy.set(TcpFault(rewrite=rewrite))
    client = connect()
    client.sendall(b"0123456789")
    client.shutdown(socket.SHUT_WR)
    assert receive(client, 100) == expected


@pytest.mark.parametrize("cut", [1, 3, 5, 10])
def test_rewrites_do_not_depend_on_how_the_answer_is_cut(cut):
    whole = b"0123456789"
    for rewrite in (shorter(3, 4), longer(3, 4)):
        pieces = [rewrite(at, whole[at : at + cut]) for at in range(0, 10, cut)]
        assert b"".join(pieces) == rewrite(0, whole)


def test_redirect_sends_new_connections_elsewhere(proxy, connect):
    other = socket.create_server(("127.0.0.1", 0))
    with closing(other):
        proxy.redirect(*other.getsockname())
        connect().sendall(b"hello")
        with closing(other.accept()[0]) as end:
            assert end.recv(5) == b"hello"


def test_a_dead_server_resets_the_client(proxy, connect):
    unused = socket.create_server(("127.0.0.1", 0))
    unused.close()
    proxy.redirect(proxy.host, 1)
    with pytest.raises(ConnectionResetError):
        connect().recv(1)


@pytest.mark.parametrize("fault", [TcpFault(frozen=True), TcpFault(black_hole=True), TcpFault()])
def test_close_releases_everything_under_any_fault(proxy, connect, fault):
    client = connect()
    assert echoes(client)
    proxy.set(fault)
    proxy.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        connect()
    assert proxy.open_connections == 0
    assert not [t for t in threading.enumerate() if t is proxy._thread]


@contextmanager
def every_socket_is_closed():
    """By somebody, not by the garbage collector."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert not told


def test_client_that_comes_while_the_fault_changes_is_not_forgotten(proxy):
    def come_and_go():
        with socket.socket() as client, suppress(OSError):
            client.settimeout(60)
            client.connect((proxy.host, proxy.port))

    with every_socket_is_closed():
        for _ in range(30):
            coming = threading.Thread(target=come_and_go)
            coming.start()
            proxy.heal()
            coming.join()


def test_port_that_was_taken_meanwhile_is_an_error_until_it_is_free_again(proxy, connect):
    proxy.set(TcpFault(refused=True))
    with (
        every_socket_is_closed(),
        socket.create_server((proxy.host, proxy.port)),
        pytest.raises(OSError, match="in use"),
    ):
        proxy.heal()
    proxy.heal()
    assert echoes(connect())


def test_connection_that_cannot_be_set_up_is_reset_on_both_sides(proxy, connect, monkeypatch):
    def refuse(sock, level, name, value):
        if name == socket.TCP_NODELAY and level == socket.IPPROTO_TCP:
            raise OSError(errno.EINVAL, "is gone")
        super(socket.socket, sock).setsockopt(level, name, value)

    monkeypatch.setattr(socket.socket, "setsockopt", refuse)
    with every_socket_is_closed():
        with pytest.raises(ConnectionResetError):
            connect().recv(1)
        proxy.close()
