"""``nixl:``: hostile peers in any number keep no reader out, and cost no reader its channel."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import pytest
from crowd import Crowd
from nixl_peer import NixlPeer, eventually, hits

from kvconnect.backends import open_backend
from kvconnect.testing import BlockMaker
from kvconnect.transfer import acceptor

WITHIN_S = 30.0


@contextlib.asynccontextmanager
async def reader(url: str):
    store = open_backend(f"{url}&patience=1s&timeout=2s").inner
    await store.open([BlockMaker.layout])
    try:
        yield store
    finally:
        await store.close()


async def opened(crowd: Crowd, number: int) -> None:
    """Returns once so many hostile peers got as far as they want to."""

    async def enough() -> bool:
        return await asyncio.to_thread(crowd.opened) >= number

    await eventually(enough, WITHIN_S)


@pytest.fixture
def url_of(tmp_path):
    """The URL of an instance, which may have a secret."""

    def url(*peers: str, secret: bool) -> str:
        query = "transport=tcp"
        if secret:
            file = tmp_path / "secret"
            if not file.exists():
                file.write_text(secrets.token_hex(32))
            query += f"&secret_file={file}"
        return f"nixl://{','.join(peers)}?{query}"

    return url


@pytest.mark.parametrize(
    ("kind", "again", "secret"),
    [
        ("channels", True, False),
        pytest.param("data", False, False, marks=pytest.mark.slow),
        pytest.param("data", True, False, marks=pytest.mark.slow),
        pytest.param("silent", True, False, marks=pytest.mark.slow),
        pytest.param("stalled", True, True, marks=pytest.mark.slow),
        pytest.param("stalled", False, True, marks=pytest.mark.slow),
    ],
)
async def test_a_crowd_keeps_no_reader_out(kit, url_of, kind, again, secret):
    far = NixlPeer(url_of(secret=secret))
    keys = kit.keys("crowd", count=6)
    far.save(kit.chain(keys))
    size = max(300, acceptor._MAX_ADMITTED + 50)
    hello = far.ask("hello")
    try:
        with Crowd(kind, far.port, hello, size, again=again) as crowd:
            await opened(crowd, size)
            async with reader(url_of(far.address, secret=secret)) as near:
                await eventually(lambda: hits(kit, near, keys), WITHIN_S)
                (link,) = near._parts.node.peers._links.values()
                channel, before = link.channel, crowd.opened()
                assert channel is not None
                for _ in range(20):
                    assert await hits(kit, near, keys)
                if again:  # as many more as there are places, and more
                    more = before + size
                    await eventually(
                        lambda: asyncio.to_thread(lambda: crowd.opened() >= more), WITHIN_S
                    )
                assert await hits(kit, near, keys)
                assert link.channel is channel
    finally:
        far.end()
