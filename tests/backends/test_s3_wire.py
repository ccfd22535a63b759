"""Requests for parts of objects and their answers, as they go over the wire."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

import pytest
from botocore.awsrequest import AWSRequest
from botocore.exceptions import ProxyConnectionError, ReadTimeoutError
from certificates import certificate
from s3_server import S3Server

from kvconnect.backends.s3.connections import Connections
from kvconnect.backends.s3.errors import Aborted
from kvconnect.backends.s3.transport import Transport, Upload, fill

TIMEOUT_S = 1.0
DATA = bytes(range(256)) * 1024


# ---------------------------------------------------------------------------------------- bodies


@contextmanager
def answering(*scripts, tls=None):
    """A server whose connections each do what the next of `scripts` says; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()
    clients = []

    def serve(script):
        with suppress(OSError):
            client, _ = listener.accept()
            with client if tls is None else tls.wrap_socket(client, server_side=True) as sock:
                clients.append(sock)
                script(sock, ended)

    threads = [threading.Thread(target=serve, args=(script,)) for script in scripts]
    for thread in threads:
        thread.start()
    scheme = "http" if tls is None else "https"
    try:
        yield f"{scheme}://localhost:{listener.getsockname()[1]}/b/x"
    finally:
        ended.set()
        for sock in (listener, *clients):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in threads:
            thread.join()


def sending(*pieces, pause_s=0.0, length=None):
    """A script: answers every request with `pieces`, and hangs up only at the end."""
    total = sum(map(len, pieces)) if length is None else length

    def script(sock, ended):
        while b"\r\n\r\n" in sock.recv(65536):
            sock.sendall(b"HTTP/1.1 206 Partial\r\nContent-Length: %d\r\n\r\n" % total)
            for piece in pieces:
                sock.sendall(piece)
                ended.wait(pause_s)

    return script


def made(tls=None):
    return Transport(Connections(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, tls=tls))


def num_open(transport):
    return len(transport.connections._open)


@pytest.fixture
def transport():
    transport = made()
    yield transport
    transport.connections.abort()
    assert num_open(transport) == 0


def asked(transport, url):
    """The body of the answer, not yet read."""
    return transport(AWSRequest(method="GET", url=url).prepare()).raw


def views_of(target, *ends):
    starts = [0, *ends]
    return [memoryview(target)[a:b] for a, b in zip(starts, [*ends, len(target)], strict=True)]


def test_one_body_fills_many_buffers_and_the_connection_serves_again(transport):
    pieces = [DATA[:3], DATA[3:70_000], DATA[70_000:]]
    with answering(sending(*pieces)) as url:
        for ends in ((), (1,), (0, 0, 5, 5, 70_001), (9_000,) * 600, tuple(range(0, 260_000, 100))):
            target = bytearray(len(DATA))
            body = asked(transport, url)
            assert fill(body, views_of(target, *ends)) == len(DATA)
            assert target == DATA
            assert fill(body, views_of(bytearray(9))) == 0
        assert num_open(transport) == 1


def test_no_byte_behind_the_body_is_touched(transport):
    with answering(sending(DATA)) as url:
        target = bytearray(b"\xee" * (len(DATA) + 100))
        assert fill(asked(transport, url), views_of(target, 7)) == len(DATA)
        assert target == DATA + b"\xee" * 100


def test_body_that_is_not_read_to_its_end_takes_its_connection_along(transport):
    with answering(sending(DATA), sending(DATA)) as url:
        body = asked(transport, url)
        assert body.read(10) == DATA[:10]
        body.close()
        assert num_open(transport) == 0
        assert asked(transport, url).read(1 << 20) == DATA


def test_body_that_ends_early_fills_no_more_than_came(transport):
    def cut_off(sock, _):
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 206 Partial\r\nContent-Length: %d\r\n\r\n" % len(DATA))
        sock.sendall(DATA[:100_000])

    with answering(cut_off) as url:
        assert fill(asked(transport, url), views_of(bytearray(len(DATA)))) == 100_000
        assert num_open(transport) == 0


def test_body_that_stops_is_given_up_after_one_timeout(transport):
    stops = sending(DATA[:100_000], length=len(DATA), pause_s=20)
    with answering(stops, stops, stops) as url:
        for _ in range(3):  # a busy machine may stop this process once, not three times
            body = asked(transport, url)
            started = time.monotonic()
            with pytest.raises(ReadTimeoutError):
                fill(body, views_of(bytearray(len(DATA)), 50_000))
            took_s = time.monotonic() - started
            assert took_s > TIMEOUT_S * 0.8
            if took_s < TIMEOUT_S * 1.8:
                return
    pytest.fail(f"given up after {took_s:.1f} s")


def test_body_that_goes_on_slowly_is_read_to_its_end(transport):
    pieces = [DATA[at : at + 60_000] for at in range(0, len(DATA), 60_000)]
    with answering(sending(*pieces, pause_s=TIMEOUT_S / 3)) as url:  # longer than the timeout
        target = bytearray(len(DATA))
        assert fill(asked(transport, url), views_of(target)) == len(DATA)
        assert target == DATA


# ------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A server's context, and the file of certificates that trusts it."""
    trusted, private = certificate(tmp_path_factory.mktemp("tls"), "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted, private)
    return context, str(trusted)


async def test_blocks_come_back_through_tls(make_s3, kit, s3_credentials, tls):
    server = S3Server(tls=tls[0])
    try:
        place = {"endpoint_url": f"https://localhost:{server.port}", "ca_bundle": tls[1]}
        keys = kit.keys("tls", count=9)
        async with kit.opened(make_s3(**place, part_nbytes=64 << 10)) as store:
            assert await store.save(kit.chain(keys)) == 9
            into = kit.buffers(9)
            assert await store.load(keys, into) == 9
            assert all(kit.holds(buffer, key) for buffer, key in zip(into, keys, strict=True))
            assert await store.lookup([kit.key("absent")]) == 0
    finally:
        server.stop()


def test_nothing_encrypted_is_read_from_a_connection_that_was_ended(tls):
    half = threading.Event()

    def script(sock, ended):
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 206 Partial\r\nContent-Length: %d\r\n\r\n" % len(DATA))
        sock.sendall(DATA[:65536])
        half.set()
        sock.sendall(DATA[65536:])
        ended.wait(60)

    context = ssl.create_default_context(cafile=tls[1])
    transport = made(context)
    with answering(script, tls=tls[0]) as url:
        body = asked(transport, url)
        target = bytearray(b"\xee" * len(DATA))
        got = fill(body, [memoryview(target)[:20_000]])
        assert half.wait(60)
        transport.connections.abort()
        with suppress(Aborted):
            got += fill(body, [memoryview(target)[got:]])
        assert target == DATA[:got] + b"\xee" * (len(DATA) - got)


def test_answer_that_is_a_connections_last_can_be_ended():
    def script(sock, ended):
        sock.recv(65536)
        head = b"HTTP/1.1 206 Partial\r\nConnection: close\r\nContent-Length: 999\r\n\r\n"
        sock.sendall(head + DATA[:100])
        ended.wait(60)

    transport = Transport(Connections(connect_timeout=TIMEOUT_S, read_timeout=60, tls=None))
    with answering(script) as url:
        body = asked(transport, url)
        assert body.read(100) == DATA[:100]
        transport.connections.abort()
        started = time.monotonic()
        with suppress(Aborted):
            assert fill(body, [memoryview(bytearray(899))]) == 0
        body.close()
        assert time.monotonic() - started < 30
    assert num_open(transport) == 0


# --------------------------------------------------------------------------------------- proxies


def through(proxy, tls=None):
    """A transport through `proxy`, which wants a password."""
    proxy = proxy.replace("://", "://user:word@")
    proxies = {"http": proxy, "https": proxy}
    return Transport(
        Connections(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, tls=tls, proxies=proxies)
    )


def test_a_proxy_forwards_requests_without_tls():
    heads = []

    def script(sock, _):
        while head := sock.recv(65536):
            heads.append(head.split(b"\r\n"))
            sock.sendall(b"HTTP/1.1 206 Partial\r\nContent-Length: 3\r\n\r\nabc")

    with answering(script) as proxy:
        transport = through(proxy)
        for _ in range(2):
            assert asked(transport, "http://service.invalid:80/b/x?y").read() == b"abc"
        transport.connections.abort()
    assert len(heads) == 2
    for first, *others in heads:
        assert first == b"GET http://service.invalid:80/b/x?y HTTP/1.1"
        assert {b"Host: service.invalid", b"Proxy-Authorization: Basic dXNlcjp3b3Jk"} <= {*others}


def test_a_proxy_connects_requests_over_tls(tls):
    heads = []

    def script(sock, ended):
        heads.append(sock.recv(65536).split(b"\r\n"))
        sock.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
        with tls[0].wrap_socket(sock, server_side=True) as inner:
            sending(DATA)(inner, ended)

    with answering(script) as proxy:
        transport = through(proxy, ssl.create_default_context(cafile=tls[1]))
        for _ in range(2):
            assert asked(transport, "https://localhost/b/x").read() == DATA
        transport.connections.abort()
    assert num_open(transport) == 0
    assert heads[0][0] == b"CONNECT localhost:443 HTTP/1.1"
    assert b"Proxy-Authorization: Basic dXNlcjp3b3Jk" in heads[0]


def test_a_proxy_that_refuses_is_named():
    def refuse(sock, _):
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 407 Authentication Required\r\nContent-Length: 0\r\n\r\n")

    with answering(refuse) as proxy:
        transport = through(proxy)
        with pytest.raises(ProxyConnectionError, match=r"localhost.*407") as refused:
            asked(transport, "https://service.invalid/b/x")
    assert "word" not in str(refused.value)
    assert num_open(transport) == 0


def test_a_proxy_whose_answer_never_ends_is_given_up():
    def drip(sock, ended):
        sock.recv(65536)
        while not ended.wait(0.01):
            sock.sendall(b"H")

    with ThreadPoolExecutor(1) as thread, answering(drip) as proxy:
        transport = through(proxy)
        answer = thread.submit(asked, transport, "https://service.invalid/b/x")
        while wait([answer], 0.02).not_done:
            transport.connections.end_overdue()  # as the store does
        with pytest.raises(ProxyConnectionError):
            answer.result()
    assert num_open(transport) == 0


# --------------------------------------------------------------------------------------- uploads


def test_upload_that_goes_on_slowly_is_sent_to_its_end(transport):
    nbytes = 8 << 20  # of which some wait in the sockets' buffers

    def receive(sock, ended):
        head = sock.recv(4096)
        left = nbytes - len(head.partition(b"\r\n\r\n")[2])
        while left > 0:
            left -= len(sock.recv(min(left, nbytes // 20), socket.MSG_WAITALL))
            ended.wait(TIMEOUT_S / 8)
        sock.sendall(b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 0\r\n\r\n")

    with answering(receive) as url:
        body = Upload([bytes(nbytes)])
        request = AWSRequest(method="PUT", url=url, data=body, stream_output=True).prepare()
        response = transport(request)
        assert (response.status_code, response.content) == (200, b"")
