"""What an ``s3:`` URL may say, and what boto3 makes of it."""

from __future__ import annotations

import pytest

from kvconnect.backends import open_backend
from kvconnect.backends.s3.answers import AnswerCache
from kvconnect.backends.s3.client import S3Client
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.s3.transport import Upload
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError


def settings(text):
    return S3Settings.from_url(StoreUrl.parse(text))


def test_every_parameter_is_understood():
    assert settings(
        "s3://bucket/a/b/?endpoint_url=http://host:9000/&region=auto&profile=me"
        "&addressing_style=virtual&ca_bundle=/ca.pem&sign_payload=no&blocks_per_object=4"
        "&part_size=1MiB&concurrency=3&timeout=2s&storage_class=STANDARD_IA&sse=aws:kms"
        "&sse_kms_key_id=key&ttl=7d&lookup_ttl=5s&miss_ttl=0"
    ) == S3Settings(
        bucket="bucket",
        prefix="a/b",
        endpoint_url="http://host:9000/",
        region="auto",
        profile="me",
        addressing_style="virtual",
        ca_bundle="/ca.pem",
        sign_payload=False,
        blocks_per_object=4,
        part_nbytes=1 << 20,
        concurrency=3,
        timeout_s=2.0,
        storage_class="STANDARD_IA",
        sse="aws:kms",
        sse_kms_key_id="key",
        ttl_s=7 * 86400.0,
        lookup_ttl_s=5.0,
        miss_ttl_s=0.0,
    )


def test_bucket_alone_is_enough():
    assert settings("s3://bucket") == S3Settings(bucket="bucket")
    assert settings("s3://bucket").name("k", "x") == "v1/k/x"
    assert settings("s3://bucket/a/").name("k", "x") == "a/v1/k/x"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3:", "bucket"),
        ("s3:///prefix", "bucket"),
        ("s3://b u/x", "bucket"),
        ("s3://key:geheim@bucket/x", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket?endpoint=http://x", "did you mean 'endpoint_url'"),
        ("s3://bucket?endpoint_url=minio:9000", "endpoint_url=minio:9000"),
        ("s3://bucket?endpoint_url=http://", "endpoint_url=http://"),
        ("s3://bucket?endpoint_url=http://x:99999", "endpoint_url"),
        ("s3://bucket?endpoint_url=http://me:x@h", "http://me:***@h: credentials are not taken"),
        ("s3://key:geheim", "s3 store: credentials are not taken from the URL; set AWS_ACCESS"),
        ("s3://bucket?addressing_style=host", "addressing_style=host"),
        ("s3://bucket?sign_payload=maybe", "sign_payload=maybe"),
        ("s3://bucket?blocks_per_object=0", "blocks_per_object=0"),
        ("s3://bucket?blocks_per_object=many", "blocks_per_object=many"),
        ("s3://bucket?concurrency=100000", "concurrency=100000"),
        ("s3://bucket?part_size=1", "part_size=1"),
        ("s3://bucket?ttl=0", "ttl=0"),
        ("s3://bucket?lookup_ttl=soon", "lookup_ttl=soon"),
        ("s3://bucket?sse_kms_key_id=k", "sse=aws:kms"),
    ],
)
def test_wrong_url_is_refused_with_what_is_right(url, told):
    with pytest.raises(ConfigurationError) as error:
        open_backend(url)
    assert told in str(error.value)
    assert "geheim" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({"endpoint_url": "http://minio.example:9000"}, "http://minio.example:9000/bucket/k"),
        (
            {"endpoint_url": "http://minio.example", "addressing_style": "virtual"},
            "http://bucket.minio.example/k",
        ),
        ({"region": "eu-west-3"}, "https://bucket.s3.eu-west-3.amazonaws.com/k"),
        (
            {"region": "eu-west-3", "addressing_style": "path"},
            "https://s3.eu-west-3.amazonaws.com/bucket/k",
        ),
    ],
)
def test_bucket_is_addressed_as_the_service_wants_it(s3_credentials, options, address):
    client = S3Client(S3Settings(bucket="bucket", **options))
    sent = []

    def refuse(request, **_):
        sent.append(request.url)
        raise InterruptedError

    client.boto3.meta.events.register_first("before-send.s3", refuse)
    with pytest.raises(InterruptedError):
        client.boto3.get_object(Bucket="bucket", Key="k")
    assert sent == [address]
    client.close()


@pytest.mark.parametrize(
    ("endpoint", "given", "signed"),
    [
        ("https://host", None, False),
        ("http://host", None, True),
        ("http://host", False, False),
        ("https://host", True, True),
    ],
)
def test_payload_is_hashed_without_tls_only(s3_credentials, endpoint, given, signed):
    client = S3Client(S3Settings(bucket="b23", endpoint_url=endpoint, sign_payload=given))
    assert client.boto3.meta.config.s3["payload_signing_enabled"] == signed
    client.close()


def test_endpoint_may_come_from_the_environment(s3_credentials, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://from.environment:1")
    client = S3Client(S3Settings(bucket="bucket", region="us-east-1"))
    assert client.boto3.meta.endpoint_url == "http://from.environment:1"
    assert client.boto3.meta.config.s3["payload_signing_enabled"]
    client.close()


def test_proxy_with_tls_is_left_to_boto3(s3_credentials, monkeypatch):
    monkeypatch.setenv("http_proxy", "https://proxy:3128")
    client = S3Client(S3Settings(bucket="bucket", endpoint_url="http://host"))
    assert client.transport is None
    client.close()


def test_upload_reads_as_its_buffers_one_after_the_other():
    parts = [b"", b"abc", b"", b"defgh", b"i"]
    upload, whole = Upload(parts), b"".join(parts)
    assert len(upload) == 9
    assert b"".join(upload.chunks()) == whole
    for size in range(1, 11):
        upload.seek(0)
        assert b"".join(iter(lambda size=size: upload.read(size), b"")) == whole
    upload.seek(4)
    assert upload.tell() == 4
    assert upload.read() == whole[4:]
    assert upload.seek(0, 2) == 9


def test_cache_keeps_the_answers_used_last_for_their_time():
    now = [0.0]
    cache = AnswerCache(3, clock=lambda: now[0])
    for key in "abc":
        cache.put(key, key.upper(), 10.0)
    assert cache.get("a") == "A"
    cache.put("d", "D", 5.0)
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    now[0] = 5.0
    assert [cache.get(key) for key in "acd"] == ["A", "C", None]
    now[0] = 10.0
    assert [cache.get(key) for key in "acd"] == [None] * 3
    assert len(cache) == 0
    cache.put("e", "E", 0.0)
    assert cache.get("e") is None
