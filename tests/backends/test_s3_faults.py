"""A service that fails costs time, nothing else: results are clear, and it works again after."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from xml.etree.ElementTree import XMLParser

import psutil
import pytest
import xxhash
from s3_server import Answer, refusal

from kvconnect.backends import open_backend
from kvconnect.errors import BackendTimeout, BackendUnavailable, ConfigurationError

PREAMBLE = struct.Struct("<8sI8s")


@pytest.fixture
async def store(make_s3, kit):
    async with kit.opened(make_s3()) as backend:
        yield backend


@pytest.fixture
async def saved(store, kit):
    """Keys of a group of blocks and of one that is alone."""
    keys = kit.keys("saved", count=9)
    await store.save(kit.chain(keys))
    return keys


def connections(port):
    """Those of this process from and to that port: no other test has any."""
    found = [c for c in psutil.Process().net_connections() if c.status != psutil.CONN_LISTEN]
    return sum(port in {a.port for a in (c.laddr, c.raddr) if a} for c in found)


def own_threads():
    """Those of stores: the kit's fork server serves the whole process."""
    names = ("kvconnect-s3", "kvconnect-frames")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


class Frozen:
    """A fault: requests (of a method) wait until `thaw` is set; `reached` counts them."""

    def __init__(self, method=None):
        self.method = method
        self.thaw = threading.Event()
        self.reached = threading.Semaphore(0)

    def __call__(self, request):
        if self.method in {None, request.method}:
            self.reached.release()
            self.thaw.wait(60)

    async def wait_for(self, count):
        for _ in range(count):
            assert await asyncio.to_thread(self.reached.acquire, timeout=60)


def only(method, kind, answer):
    """A fault: `answer` to those requests."""
    return lambda r: answer if r.method == method and r.kind == kind else None


def through_a_proxy(monkeypatch, server):
    """Makes the server the proxy for a service that only it can reach; where that is."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", server.endpoint.replace("://", "://user:word@"))
    return {"endpoint_url": "http://service.invalid:9000"}


async def works(store, kit, keys):
    into = kit.buffers(len(keys))
    assert await store.load(keys, into) == len(keys)
    assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))
    more = kit.keys("works", time.monotonic(), count=3)
    assert await store.save(kit.chain(more)) == 3
    assert await store.lookup(more) == 3


# ---------------------------------------------------------------------- answers that are errors

# And how often the same is asked: only what passes is asked again, and not for ever.
REFUSALS = [
    (403, "AccessDenied", "may not use it", 1),
    (403, "RequestTimeTooSkewed", "clock", 1),
    (403, "ExpiredToken", "expired", 1),
    (404, "NoSuchBucket", "no such bucket", 1),
    (400, "InvalidRequest", "InvalidRequest", 1),
    (409, "Busy", "Busy", 1),
    (500, "InternalError", "InternalError", 3),
    (503, "SlowDown", "SlowDown", 3),
    (400, "RequestTimeout", "RequestTimeout", 3),
]


async def test_refusal_is_told_and_no_miss(store, kit, saved, s3_server, monkeypatch, subtests):
    for place in ("botocore.endpoint", "kvconnect.backends.s3.client"):
        monkeypatch.setattr(f"{place}.time.sleep", lambda _: None)
    more = kit.keys("more", count=3)
    calls = (
        lambda: store.lookup(saved),
        lambda: store.load(saved, kit.buffers(9)),
        lambda: store.save(kit.chain(more)),
        lambda: store.delete(saved),
        lambda: store.children(saved[0]),
        store.stats,
    )
    for status, code, told, requests in REFUSALS:
        with subtests.test(code):
            answer = refusal(status, code)
            s3_server.fault = lambda _, answer=answer: answer
            s3_server.counts()
            with pytest.raises(BackendUnavailable, match=told):
                await store.lookup([kit.key("new")])
            assert s3_server.counts() == {"GET k": requests}
            for call in calls:
                with pytest.raises(BackendUnavailable, match=told):
                    await call()
            s3_server.fault = lambda _: None
            await works(store, kit, saved)


async def test_service_that_is_busy_once_is_asked_again(store, kit, saved, s3_server):
    for method in ("GET", "PUT"):
        busy = [refusal(503, "SlowDown")]
        s3_server.fault = lambda r, busy=busy, m=method: (
            busy.pop() if busy and r.method == m else None
        )
        await works(store, kit, saved)
        assert not busy


async def test_bucket_in_another_region_is_asked_there(make_s3, kit, s3_server):
    def elsewhere(request):
        if "/eu-west-9/s3/" in request.headers["authorization"]:
            return None
        answer = refusal(301, "PermanentRedirect")
        answer.headers["x-amz-bucket-region"] = "eu-west-9"
        return answer

    s3_server.fault = elsewhere
    async with kit.opened(make_s3(region="us-east-1")) as store:
        s3_server.counts()
        await works(store, kit, [])
        assert s3_server.counts()["PUT g"] == 1  # at the first attempt


async def test_success_with_an_error_for_a_body_is_a_failure(
    store, kit, saved, s3_server, monkeypatch
):
    monkeypatch.setattr("kvconnect.backends.s3.client.time.sleep", lambda _: None)
    body = refusal(200, "InternalError")
    for kind in ("k", "g"):
        s3_server.fault = only("GET", kind, body)
        with pytest.raises(BackendUnavailable):
            await store.load(saved, kit.buffers(9))
        s3_server.fault = only("PUT", kind, body)
        with pytest.raises(BackendUnavailable):
            await store.save(kit.chain(kit.keys("error body", kind, count=3)))
    s3_server.fault = lambda _: None
    await works(store, kit, saved)


async def test_of_a_long_error_only_the_beginning_is_read(
    store, kit, saved, s3_server, monkeypatch
):
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    parsed = []

    class Counting(XMLParser):
        def feed(self, data):
            parsed.append(len(data))
            super().feed(data)

    monkeypatch.setattr("botocore.parsers.ETree.XMLParser", Counting)
    body = b"<Error><Code>SlowDown</Code>" + b"<a>b</a>" * 20_000 + b"</Error>"
    for status, methods in ((200, {"PUT"}), (400, {"GET", "PUT"}), (503, {"GET", "PUT"})):
        answer = Answer(status, body)
        s3_server.fault = lambda r, a=answer, those=methods: a if r.method in those else None
        parsed.clear()
        for call in (
            lambda: store.save(kit.chain(kit.keys("long", status, count=2))),  # noqa: B023
            lambda: store.load(saved, kit.buffers(9)),
            store.stats,
        ):
            with suppress(BackendUnavailable):
                await call()
        assert parsed
        assert max(parsed) <= 64 << 10
        s3_server.fault = lambda _: None
        await works(store, kit, saved)


def range_of(status, told):
    """Changes an answer's status and the range that it tells."""

    def change(request, answer):
        if request.method == "GET" and request.kind == "g":
            span = told.format(length=len(answer.body))
            return Answer(status, answer.body, {**answer.headers, "Content-Range": span})
        return answer

    return change


async def test_wrong_range_is_a_failure(store, kit, saved, s3_server):
    for status, told in (
        *((200, ""), (206, "")),
        *((206, "bytes 1-4096/99999999"), (206, "bytes 1-{length}/99999999")),
    ):
        s3_server.after = range_of(status, told)
        into = kit.buffers(8)
        with pytest.raises(BackendUnavailable, match="range"):
            await store.load(saved[:8], into)
        assert all(kit.margins_whole(buffer) for buffer in into)
        s3_server.after = lambda _, answer: answer
        await works(store, kit, saved)


# ---------------------------------------------------------------------- bodies and connections


@pytest.mark.parametrize("kind", ["k", "g"])
async def test_body_that_breaks_off_is_read_again_and_not_for_ever(
    store, kit, saved, s3_server, monkeypatch, kind
):
    monkeypatch.setattr("kvconnect.backends.s3.client.time.sleep", lambda _: None)
    left = 1

    def cut(request, answer):
        nonlocal left
        if request.method != "GET" or request.kind != kind or not left:
            return answer
        left -= 1
        return Answer(answer.status, answer.body[:-1], answer.headers, promise=len(answer.body))

    s3_server.after = cut
    await works(store, kit, saved)
    left = 99
    into = kit.buffers(9)
    with pytest.raises(BackendUnavailable):
        await store.load(saved, into)
    assert all(kit.margins_whole(buffer) for buffer in into)
    left = 0
    await works(store, kit, saved)


async def test_connections_that_the_server_closed_are_not_used_again(store, kit, saved, s3_server):
    def closing(request, answer):
        return Answer(answer.status, answer.body, {**answer.headers, "Connection": "close"})

    s3_server.after = closing
    for _ in range(3):
        await works(store, kit, saved)
    assert not store._parts.bucket.client.transport.connections._open


async def test_idle_connections_that_the_server_closed_cost_no_attempt(
    store, kit, saved, s3_server, monkeypatch
):
    monkeypatch.setattr("kvconnect.backends.s3.client._ATTEMPTS", 1)
    for connection in list(s3_server.connections):
        connection.shutdown(socket.SHUT_RDWR)
    await works(store, kit, saved)


@contextmanager
def impatient(store):
    """Requests that begin meanwhile fail sooner than those of a busy machine may."""
    with pytest.MonkeyPatch.context() as patch:
        connections = store._parts.bucket.client.transport.connections
        patch.setattr(connections, "_read_timeout", 0.3)
        yield


async def test_frozen_server_is_a_failure_after_its_timeout(make_s3, kit, s3_server, monkeypatch):
    monkeypatch.setattr("kvconnect.backends.s3.client._ATTEMPTS", 1)
    async with kit.opened(make_s3()) as store:
        s3_server.fault = frozen = Frozen()
        with impatient(store), pytest.raises(BackendUnavailable, match=r"timeout|was closed"):
            await store.lookup([kit.key("frozen")])
        frozen.thaw.set()
        s3_server.fault = lambda _: None
        await works(store, kit, [])


@pytest.mark.parametrize("last", [False, True], ids=["", "the connection's last answer"])
@pytest.mark.parametrize("proxied", [False, True], ids=["", "through a proxy"])
async def test_bytes_that_drip_end_in_time(make_s3, kit, s3_server, monkeypatch, last, proxied):
    place = through_a_proxy(monkeypatch, s3_server) if proxied else {}
    monkeypatch.setattr("kvconnect.backends.s3.store._WATCH_S", 0.1)
    monkeypatch.setattr("kvconnect.backends.s3.client._ATTEMPTS", 1)
    key = kit.key("drip")
    async with kit.opened(make_s3(**place)) as store:
        await store.save([kit.block(key)])

        def drip(request, answer):
            if request.method == "GET":
                answer.drip_s = 0.1
                answer.headers |= {"Connection": "close"} if last else {}
            return answer

        s3_server.after = drip
        started = time.monotonic()
        with impatient(store), pytest.raises(BackendUnavailable):
            await store.load([key], kit.buffers(1))
        assert time.monotonic() - started < 60
        s3_server.after = lambda _, answer: answer
        await works(store, kit, [key])


# ---------------------------------------------------------------------- foreign and damaged objects


def packed(body):
    """`body` with the length and the checksum of a record."""
    return PREAMBLE.pack(b"KVCS3REC", len(body), xxhash.xxh3_64_digest(body)) + body


NO_RECORDS = [
    *(b"", b"x", b"KVCS3REC" + bytes(16), b'{"blocks": []}' * 99),
    packed(b"[" * 10_000),
    packed(b'{"at":1,"payload":null,"blocks":[{"offset":1e999,"nbytes":1}]}'),
]


async def test_object_that_is_no_record_is_a_miss_and_is_replaced(store, kit, s3_server):
    for data in NO_RECORDS:
        keys = kit.keys("foreign", data[:40], count=8)
        for key in keys[:3]:
            s3_server.objects[f"kv/v1/k/{key.hex()}"] = (data, '"e"', time.time())
        assert await store.lookup(keys) == 0
        assert await store.load(keys, kit.buffers(8)) == 0
        assert await store.save(kit.chain(keys)) == 8
        await works(store, kit, keys)


async def test_every_flipped_bit_of_a_record_is_a_miss(store, kit, s3_server):
    key = kit.key("flipped")
    await store.save([kit.block(key, nbytes=64)])
    ((name, (data, etag, at)),) = s3_server.objects.items()
    for position in range(0, len(data) - 64, 7):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        s3_server.objects[name] = (bytes(damaged), etag, at)
        assert await store.lookup([key]) == 0


async def test_list_of_children_that_is_damaged_is_begun_anew(store, kit, s3_server):
    parent = kit.key("parent")
    s3_server.objects[f"kv/v1/c/{parent.hex()}"] = (b"what?", '"e"', time.time())
    assert await store.children(parent) == []
    s3_server.objects[f"kv/v1/c/{parent.hex()}"] = (packed(b"[" * 10_000), '"e"', time.time())
    assert await store.children(parent) == []
    key = kit.key("child")
    await store.save([kit.block(key, parent, tokens=[1])])
    assert [child.key for child in await store.children(parent)] == [key]


async def test_list_of_children_that_was_lost_comes_back_when_its_blocks_are_saved_again(
    make_s3, kit, s3_server
):
    parent, key = kit.key("parent"), kit.key("child")
    blocks = [kit.block(parent), kit.block(key, parent, tokens=[1])]
    for block in blocks:
        async with kit.opened(make_s3()) as store:
            await store.save([block])
    s3_server.objects[f"kv/v1/c/{parent.hex()}"] = (packed(b"?"), '"e"', time.time())
    async with kit.opened(make_s3()) as store:
        assert await store.children(parent) == []
        await store.save(blocks)
        assert [child.key for child in await store.children(parent)] == [key]


async def test_service_without_conditional_writes_is_written_to_without(store, kit, s3_server):
    def unknown(request):
        if {"if-none-match", "if-match"} & request.headers.keys():
            return refusal(501, "NotImplemented")
        return None

    s3_server.fault = unknown
    keys = kit.keys("unconditional", count=9)
    assert await store.save(kit.chain(keys)) == 9
    await works(store, kit, keys)


# ---------------------------------------------------------------------- open


async def opening(backend):
    started = time.monotonic()
    try:
        await backend.open([])
    finally:
        assert time.monotonic() - started < 60
        await backend.close()


WRONG = [
    ({"bucket": "elsewhere"}, {}, r"s3://elsewhere/.*no such bucket"),
    ({}, {"AWS_SECRET_ACCESS_KEY": "guessed"}, "secret key is wrong"),
    ({}, {"AWS_ACCESS_KEY_ID": None}, "no credentials; set AWS_ACCESS_KEY_ID"),
    ({}, {"AWS_SECRET_ACCESS_KEY": None}, "AWS_SECRET_ACCESS_KEY"),
    ({"profile": "nobody"}, {}, "nobody"),
    ({"endpoint_url": "https://127.0.0.1:1", "ca_bundle": "/none.pem"}, {}, "ca_bundle=/none.pem"),
]


@pytest.mark.parametrize(("options", "environment", "told"), WRONG)
async def test_what_is_wrong_is_named_at_open(make_s3, monkeypatch, options, environment, told):
    for name, value in environment.items():
        monkeypatch.delenv(name)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=told):
        await opening(make_s3(**options))


@pytest.mark.parametrize(
    ("code", "told"), [("InvalidAccessKeyId", "access key"), ("AccessDenied", "ListBucket")]
)
async def test_refused_credentials_are_named_at_open(make_s3, s3_server, code, told):
    s3_server.fault = lambda _: refusal(403, code)
    with pytest.raises(ConfigurationError, match=told):
        await opening(make_s3())


@pytest.mark.parametrize("listens", [True, False])
async def test_endpoint_that_does_not_answer_is_named_at_open(make_s3, monkeypatch, listens):
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if not listens:
            silent.close()
        with pytest.raises(BackendUnavailable, match=endpoint):
            await opening(make_s3(endpoint_url=endpoint, timeout_s=0.2))


async def test_bucket_that_may_be_read_but_not_looked_at_is_opened(make_s3, kit, s3_server):
    s3_server.fault = lambda r: refusal(403, "AccessDenied") if r.method == "HEAD" else None
    async with kit.opened(make_s3()) as store:
        await works(store, kit, [])


async def test_a_password_in_an_endpoint_of_the_environment_is_not_told(make_s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:Kx1q@127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:1") as caught:
        await opening(make_s3(endpoint_url=None))
    assert "Kx1q" not in "".join(traceback.format_exception(caught.value))


async def test_open_ends_with_the_deadline_and_can_be_closed(make_s3, s3_server):
    s3_server.fault = frozen = Frozen()
    store = open_backend(make_s3(timeout_s=120.0), deadline_s=0.5)
    started = time.monotonic()
    with pytest.raises(BackendTimeout):
        await store.open([])
    await store.close()
    assert time.monotonic() - started < 45  # of the 120 that a request may take
    frozen.thaw.set()


# ---------------------------------------------------------------------- close


async def test_close_ends_calls_in_flight_and_leaves_nothing_open(make_s3, kit, s3_server):
    store = make_s3(timeout_s=120.0)
    await store.open([kit.layout])
    s3_server.fault = frozen = Frozen()
    keys = kit.keys("closing", count=40)
    calls = [
        asyncio.ensure_future(store.lookup(keys)),
        asyncio.ensure_future(store.save(kit.chain(keys))),
        *(asyncio.ensure_future(store.load([key], kit.buffers(1))) for key in keys),
    ]
    await frozen.wait_for(8)
    started = time.monotonic()
    await store.close()
    await store.close()
    assert time.monotonic() - started < 60
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, BackendUnavailable) for result in results)
    frozen.thaw.set()
    s3_server.stop()
    gc.collect()
    deadline = time.monotonic() + 60
    while own_threads() or connections(s3_server.port):
        assert time.monotonic() < deadline, (own_threads(), connections(s3_server.port))
        await asyncio.sleep(0.02)


async def test_block_that_another_process_saved_again_is_not_read_by_its_old_record(make_s3, kit):
    key = kit.key("again")
    async with kit.opened(make_s3(lookup_ttl_s=60.0)) as reader, kit.opened(make_s3()) as writer:
        await writer.save([kit.block(key, nbytes=1000)])
        assert await reader.lookup([key]) == 1
        await writer.delete([key])
        # The same bytes, behind a record that is longer.
        await writer.save([kit.block(key, nbytes=1000, tokens=range(100))])
        into = kit.buffer(1000)
        assert await reader.load([key], [into]) == 0
        assert await reader.load([key], [into]) == 1
        assert kit.holds(into, key, framed=False)


# ---------------------------------------------------------------------- what a failed save leaves


async def test_payload_that_no_block_points_to_is_removed(store, kit, s3_server, monkeypatch):
    """A service that takes payloads and refuses what points to them would collect them."""
    monkeypatch.setattr("kvconnect.backends.s3.client.time.sleep", lambda _: None)
    for status, code in ((403, "AccessDenied"), (503, "SlowDown"), (412, "PreconditionFailed")):
        s3_server.fault = only("PUT", "k", refusal(status, code))
        for turn in range(2):
            with pytest.raises(BackendUnavailable):
                await store.save(kit.chain(kit.keys("no pointer", code, turn, count=3)))
        assert not s3_server.objects
    s3_server.fault = lambda _: None
    await works(store, kit, [])


async def test_payload_that_some_block_points_to_stays(store, kit, s3_server):
    keys = kit.keys("some pointer", count=3)
    refused = refusal(403, "AccessDenied")
    s3_server.fault = lambda r: (
        refused if r.method == "PUT" and r.kind == "k" and keys[1].hex() in r.name else None
    )
    with pytest.raises(BackendUnavailable):
        await store.save(kit.chain(keys))
    s3_server.fault = lambda _: None
    assert await kit.stored(store, keys) == [True, False, True]
    assert await store.save(kit.chain(keys)) == 3
    assert await kit.stored(store, keys) == [True] * 3
