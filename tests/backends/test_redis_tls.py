"""Redis over TLS: a relay ends it before a plain server; and a server that was built with TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading

import pytest
from certificates import certificate
from redis_faults import Relay, answered, load
from redis_server import RedisServer, executable, free_port, until

from kvconnect.backends import open_backend
from kvconnect.backends.redis.commands import Outcome, Want
from kvconnect.backends.redis.load import fetch
from kvconnect.backends.redis.settings import Address
from kvconnect.backends.redis.wire import Wire
from kvconnect.errors import BackendUnavailable, ConfigurationError


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
async def test_blocks_of_any_size_come_back_over_tls(relay, kit, server_files, prefix, verified):
    trust = {"tls_ca": server_files[0]} if verified else {"tls_verify": "no"}
    store = await opened(relay, prefix=prefix, **trust)
    sizes = [0, 1, 16384, 16385, 4 << 20, (9 << 20) + 1]
    keys = kit.keys("tls", verified, count=len(sizes))
    blocks = [kit.block(key, nbytes=n, tokens=[1]) for key, n in zip(keys, sizes, strict=True)]
    assert await store.save(blocks) == len(sizes)
    assert await store.lookup(keys) == len(sizes)
    assert await load(store, kit, keys, sizes) == len(sizes)
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
        wire, want = (
            Wire(client, Address("here", 6379), 5.0),
            Want(b"n", memoryview(bytearray(16374)), headed=False),
        )
        assert fetch(wire, [want]) == [Outcome.DONE]
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


@pytest.mark.parametrize(
    ("after", "silent"), [(100, False), (70_000, False), (1 << 20, False), (70_000, True)]
)
async def test_connection_cut_or_silent_within_a_value(
    relay, kit, server_files, prefix, after, silent
):
    options = {"prefix": prefix, "tls_ca": server_files[0]}
    store = await opened(relay, timeout="300ms" if silent else "60s", **options)
    key = kit.key("cut")
    await answered(lambda: store.save([kit.block(key, nbytes=2 << 20)]))
    go_on = threading.Event()

    def change(data, passed):
        if silent and passed >= after:
            go_on.wait(60)
        return data if silent or passed < after else None

    relay.change = change
    buffer = kit.buffer(2 << 20)
    with pytest.raises(BackendUnavailable, match=r"no answer|timed out" if silent else None):
        await store.load([key], [buffer])
    buffer.fill_(7)
    go_on.set()
    assert bool((buffer == 7).all())
    relay.change = lambda data, _: data
    assert await answered(lambda: store.load([key], [buffer])) == 1
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


async def test_cluster_with_tls_of_its_own(has_tls, kit, server_files, tmp_path):
    own, key = map(str, server_files)
    port = free_port()
    server = RedisServer(
        tmp_path / "redis",
        *("--cluster-enabled", "yes", "--tls-cluster", "yes", "--tls-port", str(port)),
        *("--tls-cert-file", own, "--tls-key-file", key, "--tls-ca-cert-file", own),
        *("--tls-auth-clients", "yes"),
    )
    url = f"redis+cluster://127.0.0.1:{port}?tls=yes&tls_ca={own}&timeout=60s"
    try:
        server.start().admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        until(
            lambda: server.admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok",
            "the cluster",
        )
        with pytest.raises((ConfigurationError, BackendUnavailable)):
            await open_backend(url).inner.open([])
        store = open_backend(f"{url}&tls_cert={own}&tls_key={key}").inner
        await store.open([])
        keys = kit.keys("cluster", count=5)
        assert await store.save([kit.block(key, nbytes=5 << 20) for key in keys]) == 5
        assert await store.lookup(keys) == 5
        assert await store.load(keys, [kit.buffer(5 << 20) for _ in keys]) == 5
        await store.close()
    finally:
        server.stop()
