"""Redis over TLS. Where redis-server was built without, a relay ends TLS before it."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis_faults import Relay

from kvconnect.backends import open_backend
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
