"""drop --salt: of what an engine saved for a tenant, no byte is left in the medium."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis
import torch
from redis_server import own_redis  # noqa: F401  a fixture

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, PromptStore, SamplingParams
from kvconnect.backends import open_backend
from kvconnect.keys import salt_tag

T = 16
MINE, YOURS = "the salt of tenant 7", "another tenant's"
# They have no token in common: keys and values of the first layer would be the same.
PROMPTS = {
    salt: torch.randint(low, low + 110, (45,), generator=torch.Generator().manual_seed(1)).tolist()
    for low, salt in ((5, MINE), (130, YOURS))
}
_WINDOW = 64
_PAGE = 1024


@pytest.fixture(params=["disk", "redis"])
def medium(request, tmp_path) -> tuple[str, Callable[[], bytes]]:
    """A store's URL, and all that its medium holds."""
    if request.param == "disk":
        directory = tmp_path / "kv"
        return f"disk:{directory}?capacity=64MiB", lambda: b"".join(
            path.name.encode() + path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file()
        )
    server = request.getfixturevalue("own_redis")

    def everything() -> bytes:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("rdbcompression", "no")
            return b"".join(name + (client.dump(name) or b"") for name in client.scan_iter())

    return server.url, everything


def config(url: str) -> KvCacheConnectorConfig:
    return KvCacheConnectorConfig(url=url, lookup_timeout_ms=60_000, overlap_loads=False)


def save(model: Path, url: str) -> None:
    """That others than our own engine say whose a block is: tests of each."""
    cache_config = KvCacheConfig(tokens_per_block=T, max_tokens=512)
    with LLM(model, kv_cache=cache_config, connector=config(url)) as llm:
        for salt, prompt in PROMPTS.items():
            llm.generate([prompt], SamplingParams(max_tokens=1), cache_salt=[salt])


def signs_of(url: str, salt: str) -> set[bytes]:
    """What would tell of a tenant: pieces of its frames, keys, tokens, salt and its digest."""

    async def read() -> set[bytes]:
        found = {salt.encode(), salt_tag(salt)}
        backend = open_backend(url, raw=True)
        await backend.open([], "read")
        entries = [one async for one in backend.scan() if one.namespace.endswith(salt_tag(salt))]
        assert len(entries) >= 3
        for one in entries:
            into = torch.zeros(one.nbytes, dtype=torch.uint8)
            assert await backend.load([one.key], [into]) == 1
            frame = bytes(into.numpy())
            pieces = (frame[at : at + _WINDOW] for at in range(0, len(frame), _PAGE))
            found.update(piece for piece in pieces if len(set(piece)) > _WINDOW // 4)
            tokens = one.tokens.astype(np.int32).tobytes()
            found |= {one.key, one.key.hex().encode(), one.namespace}
            if len(tokens) >= 4 * 4:
                found |= {tokens, b64encode(tokens)}
        await backend.close()
        return found

    return asyncio.run(read())


def test_no_byte_of_a_dropped_tenant_is_left(llama, medium):
    url, everything = medium
    save(llama, url)
    mine, yours = signs_of(url, MINE), signs_of(url, YOURS)
    mine -= yours
    before = everything()
    seen = {sign for sign in mine if sign in before}
    kept = {sign for sign in yours if sign in before}
    assert len(seen) > 20
    assert MINE.encode() not in before, "a store never gets the salt itself"
    done = PromptStore(url).drop(salt=MINE)
    assert done.blocks >= 3
    assert done.unknown == 0
    after = everything()
    assert not [sign for sign in mine if sign in after]
    assert not [sign for sign in kept if sign not in after], "the others keep theirs"
