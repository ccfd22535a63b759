"""Requests for parts of objects and their answers, as they go over the wire."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import ReadTimeoutError
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from s3_server import S3Server

from kvconnect.backends.s3.answer import PlainAnswer
from kvconnect.backends.s3.signature import RangeRequests
from kvconnect.backends.s3.transport import Aborted, Transport

TIMEOUT_S = 1.0
DATA = bytes(range(256)) * 1024


# ------------------------------------------------------------------------------------ signature


@given(
    host=st.sampled_from(["minio:9000", "cache.s3.eu-west-1.amazonaws.com", "[::1]:80"]),
    name=st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable()),
    span=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
    secret=st.text("abc/+XYZ", min_size=1),
    token=st.none() | st.text("abc/+=", min_size=1),
    at=st.integers(0, 4_000_000_000),
)
def test_request_is_signed_as_boto3_signs_it(host, name, span, secret, token, at):
    base, told = f"http://{host}/bucket/", f"bytes={span[0]}-{span[1]}"
    key = ReadOnlyCredentials("AKID", secret, token)
    requests = RangeRequests(urlsplit(base), "eu-west-1", clock=lambda: at)
    sent = requests.get(name, told, key).decode("latin-1")
    head, *lines = sent.removesuffix("\r\n\r\n").split("\r\n")
    assert head == f"GET /bucket/{quote(name, safe='/~')} HTTP/1.1"
    headers = dict(line.split(": ", 1) for line in lines)
    url = base + quote(name, safe="/~")
    theirs = AWSRequest(method="GET", url=url, headers={"Range": told})
    with pytest.MonkeyPatch.context() as patch:
        now = datetime.fromtimestamp(at, UTC)
        patch.setattr("botocore.auth.get_current_datetime", lambda: now)
        S3SigV4Auth(key, "s3", "eu-west-1").add_auth(theirs)
    expected = {key.lower(): value for key, value in theirs.prepare().headers.items()}
    assert {**headers, "host": None} == {**expected, "host": None}


def test_key_of_another_day_and_of_another_secret_is_derived_anew():
    at = [0.0]

    def signed(requests, secret):
        return requests.get("x", "bytes=0-1", ReadOnlyCredentials("AKID", secret, None))

    def made():
        return RangeRequests(urlsplit("http://s3/b/"), "us-east-1", clock=lambda: at[0])

    lasting = made()
    for secret, at[0] in (("one", 0.0), ("two", 0.0), ("one", 0.0), ("one", 86_400.0)):
        assert signed(lasting, secret) == signed(made(), secret)


# --------------------------------------------------------------------------------------- answers

GOOD = b'HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nETag: "e"\r\n\r\nhel'


class Wire:
    """What Python's HTTP library reads from instead of a socket."""

    def __init__(self, data):
        self.data = data

    def makefile(self, _mode):
        return io.BufferedReader(io.BytesIO(self.data))


def test_answer_like_all_others_is_understood():
    assert PlainAnswer.of(GOOD) == PlainAnswer({"content-length": "5", "etag": '"e"'}, 5, b"hel")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:40],
        GOOD.replace(b"206", b"200"),
        GOOD.replace(b"1.1 206", b"1.0 206"),
        GOOD.replace(b"Length: 5", b"Length: 2"),
        GOOD.replace(b"Length: 5", b"Length: -5"),
        GOOD.replace(b"Length: 5", b"Length: +5"),
        GOOD.replace(b"Length: 5", b"Length: 0x5"),
        GOOD.replace(b"Length: 5", b"Length: \xb2"),
        GOOD.replace(b"Length: 5", b"Length:"),
        GOOD.replace(b"Content-Length", b"Content-Size"),
        GOOD.replace(b"Content-Length", b" Content-Length"),
        GOOD.replace(b"Content-Length:", b"Content-Length :"),
        GOOD.replace(b"ETag", b"Content-Length: 5\r\nETag"),
        GOOD.replace(b"ETag", b"Transfer-Encoding: chunked\r\nETag"),
        GOOD.replace(b"ETag", b"Connection: close\r\nETag"),
        GOOD.replace(b"ETag", b"\tfolded\r\nETag"),
        GOOD.replace(b"ETag: ", b"A: b\nETag: "),
        GOOD.replace(b"ETag: ", b"A: b\rETag: "),
        GOOD.replace(b"ETag: ", b"no colon\r\nETag: "),
    ],
)
def test_answer_that_differs_in_anything_is_left_to_the_library(data):
    assert PlainAnswer.of(data) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Content-Length", "ETag", "Connection", "X", "transfer-encoding"]),
            st.sampled_from(
                ["5", "3", "005", "keep-alive", "close", "chunked", "", " \t5 ", "5 5"]
            ),
        ),
        max_size=4,
    ),
    st.sampled_from(["\r\n", "\n", "\r\n ", "\r\n\r\n"]),
)
def test_what_is_understood_the_library_understands_likewise(headers, end):
    lines = "".join(f"{name}: {value}{end}" for name, value in headers)
    data = f"HTTP/1.1 206 Partial Content\r\n{lines}\r\nhel".encode()
    plain = PlainAnswer.of(data)
    if plain is None:
        return
    response = http.client.HTTPResponse(Wire(data))
    response.begin()
    assert response.length == plain.nbytes
    assert not response.will_close
    assert {name.lower(): text.strip() for name, text in response.headers.items()} == plain.headers
    assert response.fp.read() == plain.begun


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
        yield urlsplit(f"{scheme}://localhost:{listener.getsockname()[1]}/b/")
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


@pytest.fixture
def transport():
    made = Transport(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, tls=None)
    yield made
    made.abort()
    assert made.num_open == 0


REQUEST = b"GET /b/x HTTP/1.1\r\n\r\n"


def views_of(target, *ends):
    starts = [0, *ends]
    return [memoryview(target)[a:b] for a, b in zip(starts, [*ends, len(target)], strict=True)]


def test_one_body_fills_many_buffers_and_the_connection_serves_again(transport):
    pieces = [DATA[:3], DATA[3:70_000], DATA[70_000:]]
    with answering(sending(*pieces)) as url:
        for ends in ((), (1,), (0, 0, 5, 5, 70_001), (9_000,) * 600, tuple(range(0, 260_000, 100))):
            target = bytearray(len(DATA))
            reply = transport.get(url, REQUEST)
            assert reply.fill(views_of(target, *ends)) == len(DATA)
            assert target == DATA
            assert reply.fill(views_of(bytearray(9))) == 0
        assert transport.num_open == 1


def test_no_byte_behind_the_body_is_touched(transport):
    with answering(sending(DATA)) as url:
        target = bytearray(b"\xee" * (len(DATA) + 100))
        assert transport.get(url, REQUEST).fill(views_of(target, 7)) == len(DATA)
        assert target == DATA + b"\xee" * 100


def test_body_that_is_not_read_to_its_end_takes_its_connection_along(transport):
    with answering(sending(DATA), sending(DATA)) as url:
        reply = transport.get(url, REQUEST)
        assert reply.body.read(10) == DATA[:10]
        reply.body.close()
        assert transport.num_open == 0
        assert transport.get(url, REQUEST).body.read(1 << 20) == DATA


def test_body_that_ends_early_fills_no_more_than_came(transport):
    def cut_off(sock, _):
        sock.recv(65536)
        sock.sendall(b"HTTP/1.1 206 Partial\r\nContent-Length: %d\r\n\r\n" % len(DATA))
        sock.sendall(DATA[:100_000])

    with answering(cut_off) as url:
        assert transport.get(url, REQUEST).fill(views_of(bytearray(len(DATA)))) == 100_000
        assert transport.num_open == 0


def test_body_that_stops_is_given_up_after_one_timeout(transport):
    with answering(sending(DATA[:100_000], length=len(DATA), pause_s=20)) as url:
        reply = transport.get(url, REQUEST)
        started = time.monotonic()
        with pytest.raises(ReadTimeoutError):
            reply.fill(views_of(bytearray(len(DATA)), 50_000))
        assert TIMEOUT_S * 0.8 < time.monotonic() - started < TIMEOUT_S * 1.8


def test_body_that_goes_on_slowly_is_read_to_its_end(transport):
    pieces = [DATA[at : at + 60_000] for at in range(0, len(DATA), 60_000)]
    with answering(sending(*pieces, pause_s=TIMEOUT_S / 3)) as url:  # longer than the timeout
        target = bytearray(len(DATA))
        assert transport.get(url, REQUEST).fill(views_of(target)) == len(DATA)
        assert target == DATA


# ------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A server's context, and the file of certificates that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    place = tmp_path_factory.mktemp("tls")
    trusted, private = place / "trusted.pem", place / "key.pem"
    trusted.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
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
        ended.wait(20)

    context = ssl.create_default_context(cafile=tls[1])
    transport = Transport(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, tls=context)
    with answering(script, tls=tls[0]) as url:
        reply = transport.get(url, REQUEST)
        target = bytearray(b"\xee" * len(DATA))
        got = reply.fill([memoryview(target)[:20_000]])
        assert half.wait(20)
        transport.abort()
        with suppress(Aborted):
            got += reply.fill([memoryview(target)[got:]])
        assert target == DATA[:got] + b"\xee" * (len(DATA) - got)
