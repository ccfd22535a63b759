"""drop on real servers: of what was dropped no byte is left that a client could read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import boto3
import pytest
import redis
from s3_server import BUCKET, moto_server
from stored_blocks import entries, fill, prompt_chain

from kvconnect import PromptStore
from kvconnect.backends.s3.children import S3Children
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import Namespace

Contents = Callable[[], bytes]


def in_redis(server) -> bytes:
    """All that the server holds: each key's name and dump."""
    with redis.Redis.from_url(server.url) as client:
        client.config_set("rdbcompression", "no")
        return b"".join(name + (client.dump(name) or b"") for name in client.scan_iter())


def in_bucket(endpoint: str, prefix: str) -> bytes:
    """All below `prefix`: each object's name and body. All of moto's servers share one bucket."""
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    found = b""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        for one in page.get("Contents", ()):
            body = client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read()
            found += one["Key"].encode() + body
    client.close()
    return found


def in_files(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


@pytest.fixture(params=["redis", "s3", "tiered"])
def store(request, tmp_path) -> tuple[str, list[Contents]]:
    """A store's URL, and what its media hold."""
    disk, near = tmp_path / "kv", f"disk:{tmp_path}/kv?capacity=64MiB"
    if request.param == "s3":
        request.getfixturevalue("s3_credentials")
        endpoint = request.getfixturevalue("endpoint")
        prefix = uuid4().hex
        url = f"s3://{BUCKET}/{prefix}?endpoint_url={endpoint}"
        return url, [lambda: in_bucket(endpoint, prefix)]
    server = request.getfixturevalue("own_redis")
    if request.param == "redis":
        return server.url, [lambda: in_redis(server)]
    return f"tiered:?tiers={near.replace('?', '%3F')},{server.url}", [
        lambda: in_files(disk),
        lambda: in_redis(server),
    ]


@pytest.fixture
def endpoint(s3_credentials: None):
    with moto_server() as one:
        yield one


def left_of(blocks, contents: bytes) -> int:
    """How many of `blocks` have the beginning of their frame or their tokens in `contents`."""
    return sum(
        bytes(one.data[:256].numpy()) in contents or one.tokens.tobytes() in contents
        for one in blocks
    )


def test_drop_of_a_tenant_leaves_no_byte_of_it_on_any_medium(store):
    url, media = store
    mine = prompt_chain(range(1000, 1022), namespace=Namespace("mine"))
    yours = prompt_chain(range(5000, 5022), namespace=Namespace("yours"))
    fill(url, [*mine, *yours])
    for medium in media:
        assert left_of(mine, medium()) == left_of(yours, medium()) == len(mine)
    done = PromptStore(url).drop(salt="mine")
    assert (done.blocks, done.tokens) == (len(mine) * len(media), 22)
    for medium in media:
        contents = medium()
        assert left_of(mine, contents) == 0
        assert not any(one.key in contents for one in mine)
        assert left_of(yours, contents) == len(yours)
    assert entries(url).keys() == {one.key for one in yours}


@pytest.mark.parametrize("fault", ["fails", "damaged"])
def test_lists_on_s3_that_cannot_be_changed_keep_no_token(endpoint, monkeypatch, fault):
    """A drop that fails at a list of continuations can be repeated, and damage does not hide it."""
    prefix = uuid4().hex
    url = f"s3://{BUCKET}/{prefix}?endpoint_url={endpoint}"
    mine = prompt_chain(range(1000, 1022), namespace=Namespace("mine"))
    fill(url, mine)
    if fault == "fails":
        with monkeypatch.context() as patch:
            patch.setattr(S3Children, "_rewrite", unavailable)
            with pytest.raises(BackendUnavailable):
                PromptStore(url).drop(salt="mine")
    else:
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
            for name in (one["Key"] for one in page["Contents"] if "/c/" in one["Key"]):
                body = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
                client.put_object(Bucket=BUCKET, Key=name, Body=b"\0" + body[1:])
        client.close()
    PromptStore(url).drop(salt="mine")
    assert b"/c/" not in in_bucket(endpoint, prefix)  # the lists, which have tokens


def unavailable(*_given) -> None:
    raise BackendUnavailable("planted")
