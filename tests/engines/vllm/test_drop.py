"""drop of a tenant whose requests a real vLLM served: no byte of it is left on the medium."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import redis
import torch
from redis_server import own_redis  # noqa: F401  a fixture
from vllm_engine import BLOCK, connector, engine, prompts_of

from kvconnect import PromptStore
from kvconnect.backends import open_backend
from kvconnect.keys import salt_tag

pytestmark = pytest.mark.engines

# They have no token in common: values of the first layer would be the same.
MINE, YOURS = (
    [[low + token % 100 for token in p] for p in prompts_of(320, 165)] for low in (5, 130)
)
WHOLE, NOTHING = [320, 160], [0, 0]
BLOCKS = 15
PIECE = 64
"""So many bytes are neither in two blocks by chance, nor the same in all headers."""


@pytest.fixture(params=["disk", "redis"])
def medium(request, tmp_path) -> tuple[str, Callable[[], bytes]]:
    """A store's URL, and all that its medium holds."""
    if request.param == "redis":
        server = request.getfixturevalue("own_redis")
        return server.url, lambda: in_redis(server.url)
    directory = tmp_path / "store"
    return f"disk:{directory}?capacity=256MiB", lambda: in_files(directory)


def in_redis(url: str) -> bytes:
    with redis.Redis.from_url(url) as client:
        client.config_set("rdbcompression", "no")
        return b"".join(name + (client.dump(name) or b"") for name in client.scan_iter())


def in_files(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def pieces_of(url: str, salt: str) -> list[tuple[bytes, ...]]:
    """Key, tokens and pieces of the payload of each block of a tenant."""

    async def read() -> list[tuple[bytes, ...]]:
        store = open_backend(url, raw=True)
        await store.open([], "read")
        found = []
        entries = [one async for one in store.scan()]
        for one in entries:
            if one.namespace.endswith(salt_tag(salt)):
                data = torch.zeros(one.nbytes, dtype=torch.uint8)
                assert await store.load([one.key], [data]) == 1
                content = bytes(data.numpy())
                cuts = (
                    content[at : at + PIECE] for at in range(0, len(content), len(content) // 7)
                )
                payload = [one for one in cuts if len(set(one)) > PIECE // 2]  # not the padding
                assert len(payload) >= 5
                found.append((one.key, one.tokens.tobytes(), *payload))
        await store.close()
        return found

    return asyncio.run(read())


def left_of(pieces: list[tuple[bytes, ...]], content: bytes) -> int:
    return sum(any(piece in content for piece in one) for one in pieces)


def test_of_a_dropped_tenant_no_byte_is_left(llama, medium):
    url, content = medium
    with engine(llama, connector(url)) as first:
        wanted = {
            salt: first.tokens(p, salt=salt) for salt, p in (("mine", MINE), ("yours", YOURS))
        }
        first.flush()
    mine, yours = pieces_of(url, "mine"), pieces_of(url, "yours")
    assert all(len(tokens) == 4 * BLOCK for _, tokens, *_ in mine)
    before = content()
    assert left_of(mine, before) == left_of(yours, before) == BLOCKS
    assert PromptStore(url).drop(salt="mine").blocks == BLOCKS
    after = content()
    assert (left_of(mine, after), left_of(yours, after)) == (0, BLOCKS)
    with engine(llama, connector(url)) as second:
        for salt, prompts, cached in (("mine", MINE, NOTHING), ("yours", YOURS, WHOLE)):
            second.check(prompts, wanted[salt], cached, salt=salt)
