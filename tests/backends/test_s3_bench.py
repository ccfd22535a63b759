"""The benchmark of S3: each figure beside plain HTTP, boto3's ordinary way beside them."""

from __future__ import annotations

import re

import pytest
from s3_server import BUCKET, refusal

from kvconnect.bench.store.payloads import StorePlan
from kvconnect.bench.store.run import bench_store
from kvconnect.errors import BackendUnavailable
from kvconnect_bench.peers.s3 import compare
from kvconnect_bench.peers.s3_reads import bench_reads
from kvconnect_bench.store.peer import bench_peer

PLAN = StorePlan(sizes=(64 << 10,), total_nbytes=1 << 20, rounds=1, latencies=2)


@pytest.fixture
def url(s3_server):
    return f"s3://{BUCKET}/kv?endpoint_url={s3_server.endpoint}"


def test_put_and_get_stand_beside_the_same_objects_over_plain_http_and_boto3(url, s3_server):
    figures = bench_store(url, PLAN, lambda _: None)
    floors = {(one.operation, one.how): one.floor_name for one in figures}
    assert floors == {
        ("put", "bare"): "plain HTTP",
        ("get", "bare"): "plain HTTP",
        ("put", "guarded"): "plain HTTP + checksum",
        ("get", "guarded"): "plain HTTP + checksum",
        ("lookup", "bare"): "dict",
        ("lookup", "guarded"): "dict",
    }
    by_hand = [r for r in s3_server.requests if "/bench/" in r.name and r.method != "DELETE"]
    # 1, 2 and 4 connections; a round that counts and one that does not; two objects of 8 values.
    assert len(by_hand) == 2 * 3 * 2 * 2
    assert {int(r.headers.get("content-length", 0)) for r in by_hand} == {0, 8 * (64 << 10)}
    others = bench_peer(url, PLAN, None, lambda _: None)
    assert {(one.operation, one.how) for one in others} == {
        (what, how)
        for what in ("put", "get")
        for how in ("boto3, objects of 8 values", "boto3, one object per value")
    }
    assert all(one.floor and one.ratio for one in [*figures, *others])
    assert len(compare([*figures, *others])) == 2
    assert not [name for name in s3_server.objects if "/c/" not in name]


def test_reads_in_turn_are_told_with_what_they_cost_and_leave_nothing(url, s3_server):
    told = bench_reads(url, PLAN, lambda _: None)
    ways = ("plain HTTP", "bare", "guarded", "boto3, objects of 8 values", "boto3, one object per")
    calls = ("3 calls at a time", "one call at a time")
    expected = [(at_once, how) for at_once in calls for how in ways]
    assert len(told) == 1 + len(expected)
    for line, (at_once, how) in zip(told[1:], expected, strict=True):
        assert re.search(rf"{at_once} +{how}.* [\d.]+ GB/s  [\d.]+ s/GB", line)
        assert ("x as fast (" in line) == how.startswith("boto3")
    assert not [name for name in s3_server.objects if "/c/" not in name]


def test_service_that_does_not_let_itself_be_compared_with_is_told(url, s3_server):
    busy = refusal(503, "SlowDown")
    s3_server.fault = lambda r: busy if r.method == "PUT" and "/bench/" in r.name else None
    with pytest.raises(BackendUnavailable, match="503"):
        bench_store(url, PLAN, lambda _: None)
