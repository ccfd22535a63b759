"""A real S3 service's answers, changed on their way."""

from __future__ import annotations

import pytest
from mutations import mutator
from redis_faults import Relay
from s3_server import BUCKET, moto_server
from workload import Workload

from kvconnect.backends import open_backend

FORM = [pytest.param(6, id="quick"), pytest.param(100, id="long", marks=pytest.mark.slow)]
TOKENS = [
    b"\r\n",
    b"\r\n\r\n",
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 99999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Range: bytes 0-1/2\r\n",
    b'ETag: "another"\r\n',
    b"<Error><Code>NoSuchKey</Code></Error>",
    b"<Error><Code>SlowDown</Code></Error>",
    b"KVCS3REC",
    b'{"at":1,"payload":null,"blocks":[]}',
    b"<IsTruncated>true</IsTruncated>",
]


@pytest.fixture
def moto(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    with moto_server() as endpoint:
        yield int(endpoint.rpartition(":")[2])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tries", FORM)
async def test_answers_that_are_changed_cost_blocks_and_nothing_else(moto, tries):
    relay = Relay(moto)

    def make(deadline_s):
        url = (
            f"s3://{BUCKET}/kv?endpoint_url=http://127.0.0.1:{relay.port}&miss_ttl=0&lookup_ttl=0"
            f"&timeout={deadline_s}s&blocks_per_object=4"
        )
        return open_backend(url, deadline_s=deadline_s)

    work = Workload("S3 answers changed on their way", make)
    try:
        for chance in work.tries(tries):
            relay.change = mutator(chance, TOKENS, work.counts)
            await work.suffer(chance)
            relay.change = lambda data, _: data
            relay.cut()
            await work.expect_recovery()
    finally:
        relay.close()
