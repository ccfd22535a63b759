"""Redis over TLS: a relay ends it before a plain server; and a server that was built with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis_faults import Relay
from redis_server import RedisServer, executable, free_port, until

from kvconnect.backends import open_backend
from kvconnect.backends.redis.commands import Outcome, Want
from kvconnect.backends.redis.load import fetch
from kvconnect.backends.redis.settings import Address
from kvconnect.backends.redis.wire import Wire
from kvconnect.errors import BackendUnavailable, ConfigurationError


def certificate(folder, name, address):
    """Files of a certificate that vouches for itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False
        )
        .sign(key, hashes.SHA256())
    )
    files = folder / f"{name}.crt", folder / f"{name}.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


@pytest.fixture(scope="module")
def server_files(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls"), "server", "127.0.0.1")


@pytest.fixture
def context(server_files):
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(*server_files)
    return made


@pytest.fixture
def relay(redis_server, context):
    made = Relay(redis_server.port, tls=context)
    yield made
    made.close()


async def opened(relay, *, path="", **options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    store = open_backend(f"rediss://127.0.0.1:{relay.port}{path}?{query}").inner
    await store.open([])
    return store


@pytest.mark.parametrize("verified", [True, False])
async def test_blocks_of_any_size_come_back_over_tls(relay, kit, server_files, tmp_path, verified):
    trust = {"tls_ca": server_files[0]} if verified else {"tls_verify": "no"}
    store = await opened(relay, prefix=f"{tmp_path.name}:", **trust)
    sizes = [0, 1, 16384, 16385, 4 << 20, (9 << 20) + 1]
    keys = kit.keys("tls", verified, count=len(sizes))
    blocks = [kit.block(key, nbytes=n, tokens=[1]) for key, n in zip(keys, sizes, strict=True)]
    assert await store.save(blocks) == len(sizes)
    assert await store.lookup(keys) == len(sizes)
    into = [kit.buffer(n) for n in sizes]
    assert await store.load(keys, into) == len(sizes)
    assert all(kit.holds(b, key, framed=False) for b, key in zip(into, keys, strict=True))
    assert len(await store.children(None)) == len(sizes)
    await store.delete(keys)
    await store.close()


async def test_answer_nobody_asked_for_is_noticed_where_it_is_decrypted_already(context):
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    ends = socket.socketpair()
    greeting = asyncio.to_thread(context.wrap_socket, ends[0], server_side=True)
    greeted = asyncio.to_thread(trusting.wrap_socket, ends[1])
    server, client = await asyncio.gather(greeting, greeted)
    with server, client:
        # The length is torn: with its beginning, all but two bytes of the second record have room.
        server.send(b"$1")
        server.send(b"6374\r\n" + bytes(16374) + b"\r\n" + b"+O")
        wire, want = Wire(client, 5.0), Want(b"n", memoryview(bytearray(16374)), headed=False)
        assert fetch(wire, [want], Address("here", 6379)) == [Outcome.DONE]
        with pytest.raises(BackendUnavailable, match="more than was asked"):
            wire.done()


async def test_certificate_of_unknown_authority(relay):
    with pytest.raises(ConfigurationError, match="name the file with its authority in tls_ca="):
        await opened(relay)


async def test_certificate_of_another_server(redis_server, kit, tmp_path):
    files = certificate(tmp_path, "other", "127.0.0.2")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    relay = Relay(redis_server.port, tls=context)
    with pytest.raises(ConfigurationError, match="tls_verify=no"):
        await opened(relay, tls_ca=files[0])
    relay.close()


async def test_server_that_wants_a_certificate(redis_server, context, server_files, tmp_path):
    files = certificate(tmp_path, "client", "127.0.0.1")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files[0])
    relay = Relay(redis_server.port, tls=context)
    try:
        with pytest.raises((ConfigurationError, BackendUnavailable)):
            await opened(relay, tls_ca=server_files[0])
        store = await opened(relay, tls_ca=server_files[0], tls_cert=files[0], tls_key=files[1])
        await store.close()
    finally:
        relay.close()


async def test_no_tls_where_it_is_wanted(relay):
    store = open_backend(f"redis://127.0.0.1:{relay.port}?timeout=1s")
    with pytest.raises(BackendUnavailable, match=r"if it wants TLS, write rediss://|no answer"):
        await store.open([])
    await store.close()


@pytest.mark.parametrize("after", [100, 70_000, 1 << 20])
async def test_connection_cut_within_a_value(relay, kit, server_files, tmp_path, after):
    store = await opened(relay, prefix=f"{tmp_path.name}:", tls_ca=server_files[0])
    key = kit.key("cut")
    await store.save([kit.block(key, nbytes=2 << 20)])
    relay.change = lambda data, passed: data if passed < after else None
    buffer = kit.buffer(2 << 20)
    with pytest.raises(BackendUnavailable):
        await store.load([key], [buffer])
    relay.change = lambda data, _: data
    assert await store.load([key], [buffer]) == 1
    assert kit.holds(buffer, key, framed=False)
    await store.close()


# ------------------------------------------------------------------------- the server's own TLS


@pytest.fixture(scope="session")
def has_tls(tmp_path_factory):
    """Skips where the server was built without: one built with it misses a certificate here."""
    command = [executable(), "--port", "0", "--tls-port", "1"]
    told = subprocess.run(command, capture_output=True, timeout=20, check=False)
    if b"Failed to configure TLS" not in told.stdout + told.stderr:
        pytest.skip(f"{executable()} was built without TLS; KVCONNECT_TEST_REDIS names another")


@pytest.fixture
def make_tls_server(has_tls, server_files, tmp_path):
    """Starts servers that speak TLS on a second port, ``tls_port``."""
    with contextlib.ExitStack() as ends:

        def make(*options):
            tls_port = free_port()
            server = RedisServer(
                tmp_path / str(tls_port),
                *("--tls-port", str(tls_port), "--tls-cert-file", str(server_files[0])),
                *("--tls-key-file", str(server_files[1]), "--tls-ca-cert-file"),
                *(str(server_files[0]), "--tls-auth-clients", "no"),
                *options,
            )
            ends.callback(server.stop)
            server.tls_port = tls_port
            return server.start()

        yield make


@asynccontextmanager
async def native(server, **options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    store = open_backend(f"rediss://127.0.0.1:{server.tls_port}?{query}").inner
    try:
        await store.open([])
        yield store
    finally:
        await store.close()


async def test_blocks_come_back_from_a_server_with_tls(make_tls_server, kit, server_files):
    sizes = [0, 1, 16384, 16385, 4 << 20, (9 << 20) + 1]
    keys = kit.keys("native", count=len(sizes))
    blocks = [kit.block(key, nbytes=n, tokens=[1]) for key, n in zip(keys, sizes, strict=True)]
    async with native(make_tls_server(), tls_ca=server_files[0]) as store:
        assert await store.save(blocks) == len(sizes)
        assert await store.lookup(keys) == len(sizes)
        into = [kit.buffer(n) for n in sizes]
        assert await store.load(keys, into) == len(sizes)
        assert all(kit.holds(b, key, framed=False) for b, key in zip(into, keys, strict=True))
        assert {entry.key async for entry in store.scan()} == set(keys)
        await store.delete(keys)
        assert await store.lookup(keys) == 0


async def test_server_with_tls_wants_a_certificate(make_tls_server, kit, server_files):
    server = make_tls_server("--tls-auth-clients", "yes")
    with pytest.raises((ConfigurationError, BackendUnavailable)):
        async with native(server, tls_ca=server_files[0]):
            pass
    own = {"tls_cert": server_files[0], "tls_key": server_files[1]}
    async with native(server, tls_ca=server_files[0], **own) as store:
        assert await store.save([kit.block(kit.key("own"), nbytes=1 << 20)]) == 1


async def test_server_with_tls_of_unknown_authority(make_tls_server):
    with pytest.raises(ConfigurationError, match="name the file with its authority in tls_ca="):
        async with native(make_tls_server()):
            pass


async def test_server_with_tls_that_freezes_is_given_up(make_tls_server, kit, server_files):
    server, key = make_tls_server(), kit.key("frozen")
    async with native(server, tls_ca=server_files[0], timeout="300ms") as store:
        await store.save([kit.block(key, nbytes=2 << 20)])
        buffer = kit.buffer(2 << 20)
        with server.frozen():
            with pytest.raises(BackendUnavailable, match=r"no answer|timed out"):
                await store.load([key], [buffer])
            buffer.fill_(7)
        server.admin.ping()
        assert bool((buffer == 7).all())
        assert await store.load([key], [buffer]) == 1
        assert kit.holds(buffer, key, framed=False)


async def test_cluster_with_tls(make_tls_server, kit, server_files):
    server = make_tls_server("--cluster-enabled", "yes", "--tls-cluster", "yes")
    server.admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    until(
        lambda: server.admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "the cluster"
    )
    url = f"redis+cluster://127.0.0.1:{server.tls_port}?tls=yes&tls_ca={server_files[0]}"
    keys = kit.keys("cluster", count=5)
    store = open_backend(url).inner
    await store.open([])
    assert await store.save([kit.block(key, nbytes=5 << 20) for key in keys]) == 5
    assert await store.lookup(keys) == 5
    assert await store.load(keys, [kit.buffer(5 << 20) for _ in keys]) == 5
    await store.close()
