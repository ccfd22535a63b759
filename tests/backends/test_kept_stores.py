"""What an earlier version stored is found, loaded and listed: no byte on a medium has changed."""

from __future__ import annotations

import json
from pathlib import Path

import kept_stores
import pytest
import torch
from kept_stores import CODECS, FOLDER, LAYOUT, NAMESPACE, PRIORITIES, TOKENS, payload

from kvconnect import frame
from kvconnect.backend import Backend, StoredBlock
from kvconnect.backends import open_backend
from kvconnect.keys import Namespace, chain_key, root_key, store_key


@pytest.fixture(params=list(CODECS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["disk", "redis", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Backend:
    """A store as it was kept, not open yet."""
    kept = json.loads((FOLDER / f"{request.param}-{kind}.json").read_text())
    if request.param == "disk":
        kept_stores.unpack_disk(kept, tmp_path / "store")
        url = kept_stores.disk_url(tmp_path / "store")
    elif request.param == "redis":
        server = request.getfixturevalue("own_redis")
        kept_stores.unpack_redis(kept, server.admin)
        url = f"{server.url}?prefix=kv:"
    else:
        server = request.getfixturevalue("s3_server")
        kept_stores.unpack_s3(kept, server)
        url = kept_stores.s3_url(server)
    return open_backend(url, **kept_stores.options(kind, tmp_path))


async def test_a_store_of_an_earlier_version_is_read_listed_and_written_to(store: Backend):
    made = kept_stores.blocks()
    await store.open([LAYOUT])
    try:
        await is_read(store, made)
        await is_listed(store, made)
        await is_written_to(store, made)
    finally:
        await store.close()


async def is_read(store: Backend, made: list[StoredBlock]) -> None:
    chained = root_key(kept_stores.MODEL_DIGEST, (LAYOUT,), NAMESPACE)
    root = store_key(chained, 0, kept_stores.SHARD)
    keys = [block.key for block in made]
    assert await store.lookup(keys) == len(keys)
    into = [torch.zeros_like(block.data) for block in made]
    assert await store.load(keys, into) == len(keys)
    for block, buffer in zip(made, into, strict=True):
        chained = chain_key(chained, block.tokens)
        assert torch.equal(frame.payload(buffer, LAYOUT.block_nbytes), payload(chained))
    for parent, block in zip([root, *keys], made, strict=False):
        [child] = await store.children(parent)
        assert (child.key, child.tokens.tolist()) == (block.key, block.tokens.tolist())


async def is_listed(store: Backend, made: list[StoredBlock]) -> None:
    listed = {entry.key: entry async for entry in store.scan()}
    for block, tokens, priority in zip(made, TOKENS, PRIORITIES, strict=True):
        entry = listed.pop(block.key)
        assert entry.tokens.tolist() == tokens
        assert (entry.parent, entry.priority) == (block.parent, priority)
        assert (entry.namespace, entry.model) == (block.namespace, block.model)
        assert entry.group == 0
    assert not listed


async def is_written_to(store: Backend, made: list[StoredBlock]) -> None:
    assert await store.save(made) == len(made)
    await store.delete([made[0].key])
    assert await store.lookup([made[0].key]) == 0
    assert await store.save(made[:1]) == 1
    assert await store.lookup([block.key for block in made]) == len(made)


def test_keys_are_those_of_then():
    """Written down, since kept blocks and today's would agree on keys that both get from here."""
    root = root_key(kept_stores.MODEL_DIGEST, (LAYOUT,), Namespace(cache_salt="tenant"))
    assert root.hex() == "39e96045993afb269da02e96c5facdc88faf09de817383d06e71f39865f53762"
    assert [block.key.hex()[:16] for block in kept_stores.blocks()] == [
        "51c796a998b0f167",
        "e1913e77902ffa1a",
        "3353e62f2b546b43",
        "0c59b3d3cd7e0c47",
        "b05ad4f068247c61",
    ]
