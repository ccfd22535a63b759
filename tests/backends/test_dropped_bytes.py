"""drop on real servers: of what was dropped no byte is left that a client could read."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from s3_server import BUCKET
from stored_blocks import entries, fill, prompt_chain

from kvconnect import PromptStore
from kvconnect.backends.s3.children import S3Children
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import Namespace


def in_redis(server) -> bytes:
    """All that the server holds: each key's name and dump."""
    with redis.Redis.from_url(server.url) as client:
        client.config_set("rdbcompression", "no")
        return b"".join(name + (client.dump(name) or b"") for name in client.scan_iter())


def in_files(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def left_of(blocks, contents: bytes) -> int:
    """How many of `blocks` have the beginning of their frame or their tokens in `contents`."""
    return sum(
        bytes(one.data[:256].numpy()) in contents or one.tokens.tobytes() in contents
        for one in blocks
    )


# What each store leaves is searched for in test_scrub.py.
def test_drop_of_a_tenant_leaves_no_byte_of_it_in_any_tier(own_redis, tmp_path):
    disk, near = tmp_path / "kv", f"disk:{tmp_path}/kv%3Fcapacity=64MiB"
    url = f"tiered:?tiers={near},{own_redis.url}"
    media = [lambda: in_files(disk), lambda: in_redis(own_redis)]
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
def test_lists_on_s3_that_cannot_be_changed_keep_no_token(s3_server, monkeypatch, fault):
    """A drop that fails at a list of continuations can be repeated, and damage does not hide it."""
    url = f"s3://{BUCKET}/kv?endpoint_url={s3_server.endpoint}"
    mine = prompt_chain(range(1000, 1022), namespace=Namespace("mine"))
    fill(url, mine)
    if fault == "fails":
        with monkeypatch.context() as patch:
            patch.setattr(S3Children, "_rewrite", unavailable)
            with pytest.raises(BackendUnavailable):
                PromptStore(url).drop(salt="mine")
    else:
        for name in s3_server.names("c"):
            body, *more = s3_server.objects[name]
            s3_server.objects[name] = (b"\0" + body[1:], *more)
    assert s3_server.names("c")
    PromptStore(url).drop(salt="mine")
    assert not s3_server.names("c")  # the lists, which have tokens


def unavailable(*_given) -> None:
    raise BackendUnavailable("planted")
