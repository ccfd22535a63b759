"""A service that answers anything at all: it costs time, bounded by the deadline, nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import torch
from botocore.exceptions import ClientError
from s3_server import BUCKET, Answer, Request, refusal

from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.backends import open_backend
from kvconnect.backends.s3 import children as s3_children
from kvconnect.backends.s3 import client as client_module
from kvconnect.backends.s3 import find as s3_find
from kvconnect.backends.s3.client import S3Client
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.errors import BackendUnavailable, ConfigurationError

DEADLINE_S = 2.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch, request):
    """boto3 asks again at once, but where a test is about how long it waits."""
    if "unhurried" not in request.fixturenames:
        monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)


@pytest.fixture
def unhurried():
    """boto3 waits as it does."""


@pytest.fixture
async def store(make_s3, kit):
    async with kit.opened(make_s3(timeout_s=1.0)) as backend:
        yield backend


def head_of(answer, version="HTTP/1.1", **headers):
    """Status line and headers as they would be sent, without a length."""
    told = {**answer.headers, **{name.replace("_", "-"): text for name, text in headers.items()}}
    lines = [f"{version} {answer.status} Told", *(f"{name}: {text}" for name, text in told.items())]
    return "\r\n".join([*lines, "\r\n"]).encode()


def changed(answer, status=None, body=None, promise=None, **headers):
    told = {name.replace("_", "-"): text for name, text in headers.items()}
    body = answer.body if body is None else body
    return Answer(status or answer.status, body, {**answer.headers, **told}, promise)


def in_chunks(answer):
    half = len(answer.body) // 2
    parts = [part for part in (answer.body[:half], answer.body[half:]) if part]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    return Answer(0, raw=head_of(answer, Transfer_Encoding="chunked") + body)


def without_length(answer):
    return Answer(0, raw=head_of(answer, "HTTP/1.0") + answer.body)


LIES = {
    "an error as a success": lambda a: Answer(200, refusal(200, "InternalError").body, a.headers),
    "another range": lambda a: changed(a, Content_Range="bytes 7-99/100"),
    "a range that nothing has": lambda a: changed(a, Content_Range=f"bytes 0-{'9' * 40}/1"),
    "another total": lambda a: changed(
        a, Content_Range=a.headers.get("Content-Range", "").rpartition("/")[0] + "/1"
    ),
    "another object's etag": lambda a: changed(a, ETag='"of another"'),
    "no etag": lambda a: changed(a, ETag=""),
    "the whole where a part was asked for": lambda a: changed(a, 200),
    "a part where the whole was asked for": lambda a: changed(a, 206),
    "nothing": lambda a: Answer(a.status, b"", a.headers),
    "more than promised": lambda a: changed(
        a, body=a.body + b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", promise=len(a.body)
    ),
    "more than there is memory": lambda a: changed(a, 200, promise=10**15),
    "an error longer than memory": lambda a: Answer(
        503, b"<Error>", {"Retry-After": "3600"}, promise=10**15
    ),
    "a redirection to itself": lambda a: Answer(307, b"", {"Location": "/cache/kv"}),
    "another region, again and again": lambda a: Answer(
        301, refusal(301, "PermanentRedirect").body, {"x-amz-bucket-region": "eu-west-9"}
    ),
    "no answer": lambda _: None,
    "an end in the status": lambda a: Answer(0, raw=b"HTTP/1.1 2"),
    "an end in a header": lambda a: Answer(0, raw=head_of(a)[:-20]),
    "a 404 that ends in a header": lambda a: Answer(0, raw=b"HTTP/1.1 404 Not Found\r\nConte"),
    "another web server's 404": lambda a: Answer(404, b"<html><h1>404 Not Found</h1></html>"),
    "bytes that are no HTTP": lambda a: Answer(0, raw=b"\x16\x03\x01\x02\x00" * 999),
    "promises to go on": lambda a: Answer(0, raw=b"HTTP/1.1 100 Continue\r\n\r\n" * 999),
    "headers without end": lambda a: Answer(0, raw=b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 9999),
    "compressed bytes": lambda a: changed(a, Content_Encoding="gzip"),
    "a date that never comes": lambda a: changed(
        a, Last_Modified="Thu, 01 Jan 99999999999999999999 00:00:00 GMT"
    ),
    "chunks of no length": lambda a: Answer(
        0, raw=head_of(a, Transfer_Encoding="chunked") + b"what?\r\n" + a.body
    ),
    "a body that is no XML": lambda a: changed(a, body=b"<<<" * 9),
    "a choice of answers": lambda a: changed(a, 300),
    "an error that is no record": lambda a: Answer(400, b"<x><Error>text</Error></x>"),
    "XML of something else": lambda a: changed(
        a, body=b"<ListBucketResult><Contents><Size>x</Size></Contents></ListBucketResult>"
    ),
}


LIST = Request("GET", "", {}, {"list-type": ["2"], "prefix": ["kv/v1/k/"]})

# How many of nine blocks are loaded, where that is no matter of taste; ``None``: it is a failure.
LOADED = {
    "compressed bytes": None,
    "another web server's 404": None,
    "a 404 that ends in a header": None,
    "another object's etag": 9,
    "a date that never comes": 9,
}


def no_connection_is_lost(store):
    connections = store._parts.bucket.client.transport.connections
    return len(connections._open) == sum(map(len, connections._idle.values()))


async def listed(store):
    return [entry async for entry in store.scan()]


async def outcome(call):
    """What a call returns, or ``None``: it failed as it may. Fails if that took too long."""
    started = time.monotonic()
    try:
        return await call
    except BackendUnavailable:
        return None
    finally:
        assert time.monotonic() - started < 60  # on a quiet machine twice DEADLINE_S


@pytest.mark.timeout(300)
async def test_lie_is_a_miss_or_a_failure_in_time_and_is_forgotten(store, kit, s3_server, subtests):
    for lie, changes in LIES.items():
        with subtests.test(lie):
            s3_server.after = lambda _, answer: answer
            s3_server.objects.clear()
            await is_forgotten(store, kit, s3_server, lie, changes)


async def is_forgotten(store, kit, s3_server, lie, changes):
    keys = kit.keys("lied about", lie, count=9)
    assert await store.save(kit.chain(keys)) == 9
    s3_server.after = lambda _, answer: changes(answer)
    into = kit.buffers(9)
    s3_server.counts()
    count = await outcome(store.load(keys, into))
    assert s3_server.counts().total() <= 20
    for buffer, key in zip(into[: count or 0], keys, strict=False):
        assert lie.startswith(("nothing", "a body", "XML")) or kit.holds(buffer, key)
    assert all(kit.margins_whole(buffer) for buffer in into)
    assert count == LOADED.get(lie, count)
    more = kit.keys("more", lie, count=9)
    for call in (
        store.lookup(keys),
        store.save(kit.chain(more)),
        store.delete(more[:2]),
        store.children(keys[0]),
        store.describe(keys),
        store.stats(),
        listed(store),
    ):
        await outcome(call)
    assert no_connection_is_lost(store)
    s3_server.after = lambda _, answer: answer
    await until_sound(store, kit, keys)


async def test_answer_that_tells_no_length_is_read_to_its_end(store, kit, s3_server):
    keys = kit.keys("no length", count=9)
    assert await store.save(kit.chain(keys)) == 9
    for form in (in_chunks, without_length):
        s3_server.after = lambda r, answer, form=form: form(answer) if r.method == "GET" else answer
        await until_sound(store, kit, keys)
        assert len(await listed(store)) == 9
        assert no_connection_is_lost(store)
        assert [child.key for child in await store.children(keys[0])] == []


async def until_sound(store, kit, keys):
    assert await store.save(kit.chain(keys)) == len(keys)
    into = kit.buffers(len(keys))
    assert await store.load(keys, into) == len(keys)
    assert all(kit.holds(buffer, key) for buffer, key in zip(into, keys, strict=True))


@pytest.mark.parametrize("kind", ["empty pages", "the same page"])
async def test_listing_without_end_ends(store, kit, s3_server, monkeypatch, kind):
    monkeypatch.setattr("kvconnect.backends.s3.bucket._MOST_BARREN_PAGES", 5)
    await store.save(kit.chain(kit.keys("endless", count=9)))
    (item,) = re.findall(rb"<Contents>.*</Contents>", s3_server.stored(LIST).body)
    numbers = itertools.count()

    def without_end(request, answer):
        if "list-type" not in request.query:
            return answer
        items = item if kind == "the same page" else b""
        token = b"<NextContinuationToken>%d</NextContinuationToken>" % next(numbers)
        more = b"<IsTruncated>true</IsTruncated>" + token
        return changed(answer, body=b"<ListBucketResult>" + more + items + b"</ListBucketResult>")

    s3_server.after = without_end
    with pytest.raises(BackendUnavailable, match="its listing does not end"):
        await listed(store)


async def test_objects_of_other_blocks_are_misses(make_s3, kit, s3_server):
    keys = kit.keys("mixed up", count=4)
    store = open_backend(make_s3(blocks_per_object=2))
    async with kit.opened(store):
        assert await store.save(frames(kit, keys)) == 4
        real, (one, other) = s3_server.objects, s3_server.names("g")
        entries = dict(zip(s3_server.names("k"), reversed(s3_server.names("k")), strict=True))
        # Etags and lengths are those of what was asked for.
        s3_server.objects = {**real, one: (real[other][0], *real[one][1:])}
        s3_server.objects[other] = (real[one][0], *real[other][1:])
        assert await store.load(keys, kit.buffers(4)) == 0
        s3_server.objects = {name: real[entries.get(name, name)] for name in real}
        assert await store.lookup(keys) == 0
        s3_server.objects = real
        assert await store.save(frames(kit, keys)) == 4
        assert await store.load(keys, kit.buffers(4)) == 4


def frames(kit, keys):
    made = []
    for block in kit.chain(keys):
        data = torch.zeros(kit.frame_nbytes, dtype=torch.uint8)
        payload = kit.layout.block_nbytes
        frame.seal(data, frame.FrameHeader(2, payload, kit.layout.fingerprint(), block.key))
        made.append(StoredBlock(block.key, data, block.parent))
    return made


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 3, 5, 7)]
)
async def test_what_was_dropped_for_a_lie_is_found_or_saved_again_on_the_next_use(
    make_s3, kit, s3_server, seed
):
    """An endpoint that for a while answers a GET with another object makes misses, no scars."""
    keys = kit.keys("dropped", count=20)
    blocks = frames(kit, keys)
    await use(open_backend(make_s3()), kit, blocks)
    await use(open_backend(make_s3(prefix="other")), kit, frames(kit, kit.keys("other", count=20)))
    chance = random.Random(seed)

    def another(request):
        if request.method != "GET" or not request.name or chance.random() < 0.5:
            return None
        name = chance.choice(sorted(s3_server.objects))
        return s3_server.stored(replace(request, name=name))

    for _ in range(3):
        s3_server.fault = another
        with suppress(BackendUnavailable):
            await use(open_backend(make_s3()), kit, blocks)
        with suppress(BackendUnavailable):
            await delete(open_backend(make_s3()), kit, chance.sample(keys, 3))
        s3_server.fault = lambda _: None
        await use(open_backend(make_s3()), kit, blocks)
        assert await use(open_backend(make_s3()), kit, blocks) == len(keys)


@pytest.mark.parametrize("left", [(1, 2, 3), (2,)])
async def test_blocks_whose_payload_a_lie_took_away_are_saved_again_on_the_next_use(
    make_s3, kit, s3_server, left
):
    """Whether a save has asked for their objects before, or finds them as it writes."""
    keys = kit.keys("taken", count=4)
    blocks = frames(kit, keys)
    for prefix in ("kv", "other"):  # of which each has a payload of its own
        await use(open_backend(make_s3(prefix=prefix)), kit, blocks)

    def others(request):
        if request.method != "GET" or request.kind != "k" or keys[0].hex() in request.name:
            return None
        return s3_server.stored(replace(request, name=request.name.replace("kv", "other", 1)))

    s3_server.fault = others
    await delete(open_backend(make_s3()), kit, keys[:1])
    s3_server.fault = lambda _: None
    assert not [name for name in s3_server.names("g") if name.startswith("kv/")]
    for number in {1, 2, 3} - set(left):
        del s3_server.objects[f"kv/v1/k/{keys[number].hex()}"]
    assert await use(open_backend(make_s3()), kit, blocks) == 0
    assert await use(open_backend(make_s3()), kit, blocks) == 4


async def test_a_block_is_there_by_its_own_object_not_by_what_its_neighbours_tell(
    make_s3, kit, s3_server
):
    keys = kit.keys("told", count=4)
    blocks = frames(kit, keys)
    for prefix in ("kv", "other"):
        await use(open_backend(make_s3(prefix=prefix)), kit, blocks)
    ours, others = (f"{prefix}/v1/k/{keys[1].hex()}" for prefix in ("kv", "other"))
    s3_server.objects[ours] = s3_server.objects[others]  # points to what is not there
    del s3_server.objects[f"kv/v1/k/{keys[0].hex()}"]
    assert await use(open_backend(make_s3()), kit, blocks) == 0
    assert await use(open_backend(make_s3()), kit, blocks) == 4


async def use(store, kit, blocks):
    """What an engine does with a prompt: it loads what there is and saves the rest; how much."""
    keys = [block.key for block in blocks]
    into = kit.buffers(len(keys))
    async with kit.opened(store):
        loaded = await store.load(keys[: await store.lookup(keys)], into)
        for block, buffer in zip(blocks[:loaded], into, strict=False):
            assert torch.equal(buffer, block.data)
        assert await store.save(blocks[loaded:]) == len(blocks) - loaded
    return loaded


async def delete(store, kit, keys):
    async with kit.opened(store):
        await store.delete(keys)


async def test_storm_of_refusals_that_ask_for_an_hour_ends_with_the_deadline(
    make_s3, kit, s3_server, unhurried
):
    store = open_backend(make_s3(), raw=True, deadline_s=DEADLINE_S)
    async with kit.opened(store):
        busy = refusal(503, "SlowDown")
        busy.headers["Retry-After"] = "3600"
        s3_server.fault = lambda _: busy
        keys = kit.keys("storm", count=20)
        await asyncio.gather(
            *(outcome(store.lookup([key])) for key in keys),
            outcome(store.save(kit.chain(keys))),
            outcome(store.load(keys, kit.buffers(20))),
        )
        s3_server.fault = lambda _: None
        await asyncio.wait_for(store.inner.close(), 60)  # waits for none of them


async def test_object_that_is_there_for_writers_only_is_a_failure(make_s3, kit, s3_server):
    keys = kit.keys("contradiction", count=2)
    async with kit.opened(make_s3(blocks_per_object=1)) as store:
        there = refusal(412, "PreconditionFailed")
        s3_server.fault = lambda r: there if r.method == "PUT" else None
        with pytest.raises(BackendUnavailable, match="others keep changing"):
            await store.save(kit.chain(keys))
        assert s3_server.counts()["PUT k"] <= 8
        assert await store.lookup(keys) == 0
        s3_server.fault = lambda _: None
        await until_sound(store, kit, keys)


@pytest.mark.parametrize("code", ["RequestTimeTooSkewed", "ExpiredToken", "InvalidAccessKeyId"])
async def test_signatures_from_before_a_machine_slept_cost_no_call(make_s3, kit, s3_server, code):
    keys = kit.keys("slept", count=9)
    async with kit.opened(make_s3()) as store:
        await until_sound(store, kit, keys)
        before = {request.headers["authorization"] for request in s3_server.requests}
        s3_server.fault = lambda r: refusal(403, code) if made_before(r) else None

        def made_before(request):
            return request.headers["authorization"] in before

        clock = datetime.now(UTC) + timedelta(seconds=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("botocore.auth.get_current_datetime", lambda **_: clock)
            into = kit.buffers(9)
            assert await store.load(keys, into) == 9
            s3_server.fault = lambda _: refusal(403, code)
            s3_server.counts()
            with pytest.raises(BackendUnavailable):
                await store.lookup(keys[:1])
            assert s3_server.counts().total() <= 2


@pytest.mark.parametrize("page", [b"", b"<html><h1>404 Not Found</h1></html>", b"Not found."])
async def test_another_web_server_is_no_empty_bucket(make_s3, s3_server, page):
    s3_server.fault = lambda _: Answer(404, page)
    store = make_s3()
    with pytest.raises(ConfigurationError, match="no S3 service"):
        await store.open([])


# ---------------------------------------------------------------------- credentials that expire


@pytest.fixture
def vault(monkeypatch, tmp_path, s3_credentials):
    """A program that boto3 asks for credentials; what is written to the file is what it says."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    said = tmp_path / "said.json"
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = cat {said}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))

    def say(token, lifetime_s):
        ends = datetime.now(UTC) + timedelta(seconds=lifetime_s)
        key = {"AccessKeyId": "tester", "SecretAccessKey": "secret", "SessionToken": token}
        said.write_text(json.dumps({"Version": 1, **key, "Expiration": ends.isoformat()}))

    return say


def expired(*tokens):
    """A fault: these are refused."""
    refused = refusal(400, "ExpiredToken")
    return lambda r: refused if r.headers.get("x-amz-security-token") in tokens else None


async def test_credentials_that_expire_are_renewed_in_time(make_s3, kit, s3_server, vault):
    keys = kit.keys("renewed", count=9)
    vault("first", 60)  # boto3 asks anew before that
    async with kit.opened(make_s3()) as store:
        assert await store.save(kit.chain(keys)) == 9
        vault("second", 3600)
        s3_server.fault = expired("first")
        await until_sound(store, kit, keys)
        assert {r.headers["x-amz-security-token"] for r in s3_server.requests} == {
            "first",
            "second",
        }


async def test_credentials_that_are_not_renewed_are_a_failure_until_they_are(
    make_s3, kit, s3_server, vault
):
    keys = kit.keys("not renewed", count=9)
    vault("first", 60)
    async with kit.opened(make_s3()) as store:
        assert await store.save(kit.chain(keys)) == 9
        vault("late", -60)
        s3_server.fault = expired("first", "late")
        with pytest.raises(BackendUnavailable, match="expired"):
            await store.load(keys, kit.buffers(9))
        with pytest.raises(BackendUnavailable, match="expired"):
            await store.save(kit.chain(kit.keys("more", count=2)))
        vault("second", 3600)
        await until_sound(store, kit, keys)


async def test_credentials_that_are_expired_at_open_are_told(make_s3, vault):
    vault("late", -60)
    store = make_s3()
    with pytest.raises((BackendUnavailable, ConfigurationError), match="expired"):
        await store.open([])


def test_ranges_of_an_object_share_a_signature_until_it_is_old_or_refused(s3_server, monkeypatch):
    client = S3Client(S3Settings(bucket=BUCKET, prefix="kv", endpoint_url=s3_server.endpoint))
    client.look(BUCKET, "absent")
    s3_server.objects["x"] = (bytes(100), '"x"', 0.0)
    signed = []
    sign = client.boto3._request_signer.sign
    monkeypatch.setattr(
        client.boto3._request_signer,
        "sign",
        lambda name, request: (signed.append(request.url), sign(name, request)),
    )

    def read(start):
        bounds = {"Range": f"bytes={start}-{start + 9}"}
        return client.ask("GET", "x", lambda answer: answer.raw.read(), headers=bounds)

    assert [len(read(start)) for start in range(0, 100, 10)] == [10] * 10
    assert len({request.headers["range"] for request in s3_server.requests[-10:]}) == 10
    assert len(signed) == 1
    clock = time.monotonic() + 61
    monkeypatch.setattr(client_module.time, "monotonic", lambda: clock)
    read(0)
    assert len(signed) == 2
    s3_server.fault = lambda request: refusal(403, "SignatureDoesNotMatch")
    with pytest.raises(ClientError):
        read(0)
    assert len(signed) == 3  # perhaps it was only too old
    with pytest.raises(ClientError):
        read(0)
    assert len(signed) == 4
    s3_server.fault = lambda request: None
    read(0)
    assert len(signed) == 5
    client.close()


async def test_long_records_and_lists_are_not_all_remembered(make_s3, kit, s3_server, monkeypatch):
    """Whoever writes to the bucket chooses their length."""
    monkeypatch.setattr(s3_find, "_MOST_CACHED", 100)  # KiB
    monkeypatch.setattr(s3_children, "_MOST_CACHED", 100)
    tokens = range(10_000)
    keys, parents = kit.keys("long", count=12), kit.keys("parent", count=12)
    async with kit.opened(make_s3(lookup_ttl_s=60.0)) as writer:
        for key, parent in zip(keys, parents, strict=True):
            await writer.save([kit.block(key, parent, tokens=tokens)])
    async with kit.opened(make_s3(lookup_ttl_s=60.0)) as store:
        for key, parent in zip(keys, parents, strict=True):
            assert await store.lookup([key]) == 1
            assert len(await store.children(parent)) == 1
        assert 1 <= len(store._parts.finder) <= 3
        assert 1 <= len(store._parts.children._cache) <= 3
